"""The noise scale's estimators against gradients whose moments are known, and what follows from the scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.noise import rate_at, steps_at
from shoal.cost.noise_scale import Moments, MovingMoments, moments

SIGNAL, TRACE, DIMS = 4.0, 50.0, 200
STATISTICAL = 0.05  # 2000 draws of 200 numbers: four standard errors


def test_two_batch_sizes_give_both_moments_without_bias() -> None:
    """Means over many steps of gradients drawn with a known |G|^2 and tr(Sigma)."""
    draw = np.random.default_rng(0)
    mean = np.full(DIMS, np.sqrt(SIGNAL / DIMS))
    samples = mean + draw.normal(0, np.sqrt(TRACE / DIMS), (2000, 8, DIMS))
    small = (samples.reshape(2000, 4, 2, DIMS).mean(2) ** 2).sum(-1).mean()
    big = (samples.mean(1) ** 2).sum(-1).mean()
    found = moments(small, big, small_inverse=1 / 2, big_inverse=1 / 8)
    assert found.signal == pytest.approx(SIGNAL, rel=STATISTICAL)
    assert found.trace == pytest.approx(TRACE, rel=STATISTICAL)
    assert found.scale == pytest.approx(TRACE / SIGNAL, rel=2 * STATISTICAL)


@given(signal=st.floats(0.1, 10), trace=st.floats(0, 100), small=st.integers(1, 8), times=st.integers(2, 8))
def test_expected_norms_give_the_moments_exactly(signal: float, trace: float, small: int, times: int) -> None:
    """E |G_B|^2 = |G|^2 + tr(Sigma) / B, solved for both."""
    big = small * times
    found = moments(signal + trace / small, signal + trace / big, small_inverse=1 / small, big_inverse=1 / big)
    assert found.signal == pytest.approx(signal, rel=1e-9, abs=1e-9)
    assert found.trace == pytest.approx(trace, rel=1e-9, abs=1e-9)


def test_one_batch_size_is_refused() -> None:
    """Two equations are needed for two unknowns."""
    with pytest.raises(ValueError, match="small batch"):
        moments(1.0, 1.0, small_inverse=1 / 4, big_inverse=1 / 4)


def test_the_average_has_no_bias_from_its_start() -> None:
    """Equal readings have themselves for a mean, from the first on."""
    average = MovingMoments(decay=0.95)
    for _ in range(3):
        average = average.after(Moments(signal=2.0, trace=6.0))
        assert average.mean.signal == pytest.approx(2.0)
        assert average.mean.scale == pytest.approx(3.0)


def test_a_signal_lost_in_noise_has_no_scale() -> None:
    """Not a number, rather than a negative batch size."""
    assert np.isnan(Moments(signal=-0.1, trace=3.0).scale)


@given(scale=st.floats(0.1, 1e3), steps=st.integers(1, 50), batch=st.floats(1, 1e3), measured=st.floats(1, 1e3))
def test_steps_and_samples_lie_on_the_papers_curve(scale: float, steps: int, batch: float, measured: float) -> None:
    """(S / S_min - 1)(E / E_min - 1) = 1 at a constant noise scale, and the measured batch gives its own steps."""
    found = steps_at(batch, scales=[scale] * steps, measured_batch=measured)
    fewest = steps_at(1e15, scales=[scale] * steps, measured_batch=measured)
    samples, least = found * batch, fewest * scale
    assert (found / fewest - 1) * (samples / least - 1) == pytest.approx(1, rel=1e-6)
    assert steps_at(measured, scales=[scale] * steps, measured_batch=measured) == pytest.approx(steps)


def test_the_rate_rises_with_the_batch_to_the_best_one() -> None:
    """Half of it at the noise scale, as the paper's rule has it; slower for a smaller power."""
    assert rate_at(10, best_rate=1.0, noise_scale=10) == pytest.approx(0.5)
    assert rate_at(10, best_rate=1.0, noise_scale=10, power=0.5) == pytest.approx(0.5**0.5)
    assert rate_at(1e9, best_rate=1.0, noise_scale=10) == pytest.approx(1.0)
