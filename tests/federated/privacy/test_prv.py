"""The tighter accountant against a known value, the closed form of the Gaussian mechanism, and the looser one."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from shoal.federated.privacy import prv, rdp


def test_a_known_run_spends_what_is_known() -> None:
    """Noise 1.5, chance 0.04, 2,249 steps, delta 1e-5: 6.7774, an upper bound with error 0.01."""
    assert round(prv.epsilon(noise=1.5, chance=0.04, steps=2249, delta=1e-5), 4) == 6.7774


@pytest.mark.parametrize(("noise", "steps"), [(2.0, 1), (4.0, 9)])
def test_without_sampling_it_is_the_gaussian_mechanism(noise: float, steps: int) -> None:
    """k steps of noise z are one of z / sqrt(k), whose delta is known (Balle, Wang, arXiv:1805.06530, theorem 8)."""
    scale = noise / math.sqrt(steps)

    def delta(epsilon: float) -> float:
        low, high = 1 / (2 * scale) - epsilon * scale, -1 / (2 * scale) - epsilon * scale
        return norm.cdf(low) - math.exp(epsilon) * norm.cdf(high)

    exact = brentq(lambda epsilon: delta(epsilon) - 1e-5, 0, 50)
    found = prv.epsilon(noise=noise, chance=1.0, steps=steps, delta=1e-5)
    assert exact <= found <= exact + 2 * prv.ERROR


def test_it_is_never_above_the_looser_one() -> None:
    for noise, chance, steps in ((1.0, 0.1, 50), (3.0, 0.5, 10)):
        tight = prv.epsilon(noise=noise, chance=chance, steps=steps, delta=1e-5)
        assert 0 < tight < rdp.epsilon(noise=noise, chance=chance, steps=steps, delta=1e-5)
    assert prv.epsilon(noise=1.0, chance=0.1, steps=0, delta=1e-5) == 0.0
