"""The accountant against known values and against numerical integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from shoal.federated.privacy.rdp import ORDERS, divergence, epsilon, most_steps


def test_a_known_run_spends_what_is_known() -> None:
    """Noise 1.5, chance 0.04, 2,250 steps, delta 1e-5: 7.3291."""
    assert round(epsilon(noise=1.5, chance=0.04, steps=2250, delta=1e-5), 4) == 7.3291


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
    assert epsilon(noise=2.0, chance=0.5, steps=0, delta=1e-5) == 0.0


def test_the_budget_is_used_and_not_overdrawn() -> None:
    """The most steps within a budget: one more spends too much."""
    steps = most_steps(noise=1.5, chance=0.04, delta=1e-5, budget=3.0, limit=10_000)
    assert epsilon(noise=1.5, chance=0.04, steps=steps, delta=1e-5) <= 3.0
    assert epsilon(noise=1.5, chance=0.04, steps=steps + 1, delta=1e-5) > 3.0
    assert most_steps(noise=1.5, chance=0.04, delta=1e-5, budget=3.0, limit=10) == 10
    assert len(set(ORDERS)) == len(ORDERS)
