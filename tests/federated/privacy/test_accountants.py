"""Accountants against known values, numerical integration and the closed form of the Gaussian mechanism."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import ive
from scipy.stats import norm

from shoal.federated.privacy.accountants import (
    ERROR,
    ORDERS,
    Skellam,
    divergence,
    most_steps,
    prv_epsilon,
    rdp_epsilon,
    sampled_skellam,
    skellam_divergence,
)


def test_a_known_run_spends_what_is_known() -> None:
    """Noise 1.5, chance 0.04, 2,250 steps, delta 1e-5: 7.3291."""
    assert round(rdp_epsilon(noise=1.5, chance=0.04, steps=2250, delta=1e-5), 4) == 7.3291


@pytest.mark.parametrize("order", [1.1, 1.5, 2.0, 3.7, 8.0, 17.5])
@pytest.mark.parametrize(("noise", "chance"), [(1.5, 0.04), (0.8, 0.01), (4.0, 0.5)])
def test_the_divergence_is_its_integral(order: float, noise: float, chance: float) -> None:
    """E of ((1 - q) + q L)^a over N(0, z^2), by quadrature."""

    def integrand(x: float) -> float:
        log_ratio = np.logaddexp(math.log1p(-chance), math.log(chance) + (2 * x - 1) / (2 * noise**2))
        return math.exp(norm.logpdf(x, scale=noise) + order * log_ratio)

    moment, _ = quad(integrand, -30 * noise, 30 * noise + 2 * order, points=[0, order], limit=500)
    assert divergence(order, noise=noise, chance=chance) == pytest.approx(math.log(moment) / (order - 1), rel=1e-5)


def test_without_sampling_it_is_the_gaussian_mechanism() -> None:
    assert divergence(8, noise=2.0, chance=1.0) == 1.0
    assert divergence(8, noise=2.0, chance=0.0) == 0.0
    assert rdp_epsilon(noise=2.0, chance=0.5, steps=0, delta=1e-5) == 0.0


def test_the_budget_is_used_and_not_overdrawn() -> None:
    """The most steps within a budget: one more spends too much."""
    steps = most_steps(noise=1.5, chance=0.04, delta=1e-5, budget=3.0, limit=10_000)
    assert rdp_epsilon(noise=1.5, chance=0.04, steps=steps, delta=1e-5) <= 3.0
    assert rdp_epsilon(noise=1.5, chance=0.04, steps=steps + 1, delta=1e-5) > 3.0
    assert most_steps(noise=1.5, chance=0.04, delta=1e-5, budget=3.0, limit=10) == 10
    assert len(set(ORDERS)) == len(ORDERS)


def test_a_known_run_spends_what_is_known_by_prv() -> None:
    """Noise 1.5, chance 0.04, 2,249 steps, delta 1e-5: 6.7774, an upper bound with error 0.01."""
    assert round(prv_epsilon(noise=1.5, chance=0.04, steps=2249, delta=1e-5), 4) == 6.7774


@pytest.mark.parametrize(("noise", "steps"), [(2.0, 1), (4.0, 9)])
def test_without_sampling_prv_is_the_gaussian_mechanism(noise: float, steps: int) -> None:
    """k steps of noise z are one of z / sqrt(k), whose delta is known (Balle, Wang, arXiv:1805.06530, theorem 8)."""
    scale = noise / math.sqrt(steps)

    def delta(epsilon: float) -> float:
        low, high = 1 / (2 * scale) - epsilon * scale, -1 / (2 * scale) - epsilon * scale
        return norm.cdf(low) - math.exp(epsilon) * norm.cdf(high)

    exact = brentq(lambda epsilon: delta(epsilon) - 1e-5, 0, 50)
    found = prv_epsilon(noise=noise, chance=1.0, steps=steps, delta=1e-5)
    assert exact <= found <= exact + 2 * ERROR


def test_prv_is_never_above_the_looser_bound() -> None:
    for noise, chance, steps in ((1.0, 0.1, 50), (3.0, 0.5, 10)):
        tight = prv_epsilon(noise=noise, chance=chance, steps=steps, delta=1e-5)
        assert 0 < tight < rdp_epsilon(noise=noise, chance=chance, steps=steps, delta=1e-5)
    assert prv_epsilon(noise=1.0, chance=0.1, steps=0, delta=1e-5) == 0.0


@pytest.mark.parametrize("order", [2, 3, 8, 20])
@pytest.mark.parametrize("shift", [1, 4])
def test_the_skellam_bound_holds_and_is_near(order: int, shift: int) -> None:
    """Against the divergence of two Skellam distributions, one moved by `shift`, summed over whole numbers."""
    variance = 900.0
    values = np.arange(-300, 300)  # ten deviations
    here, there = (np.log(ive(np.abs(values - moved), variance)) for moved in (0, shift))
    exact = float(np.logaddexp.reduce(order * there - (order - 1) * here)) / (order - 1)
    bound = skellam_divergence(order, Skellam(variance, float(shift), float(shift)))
    assert exact <= bound <= exact * 1.05


def test_large_skellam_noise_spends_what_normal_noise_does() -> None:
    """With and without sampling; sampling costs the general bound's factor for high orders."""
    noise = Skellam((1.5 * 1e4) ** 2, 1e5, 1e4)
    for order in (2, 16, 63):
        assert skellam_divergence(order, noise) == pytest.approx(divergence(order, noise=1.5, chance=1.0), rel=1e-4)
        sampled, normal = sampled_skellam(order, noise, 0.05), divergence(order, noise=1.5, chance=0.05)
        assert normal <= sampled <= 3 * normal
    assert sampled_skellam(8, noise, 1.0) == skellam_divergence(8, noise)
