"""Learning rates."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.config import SGD, Schedule
from shoal.optim.schedule import peak_rate, rate

KINDS = st.sampled_from(["cosine", "linear", "constant"])


@given(kind=KINDS, warmup=st.integers(0, 50), steps=st.integers(1, 200), final=st.floats(0, 1))
def test_a_rate_rises_to_its_peak_and_then_never_rises(kind, warmup: int, steps: int, final: float) -> None:
    """It is never above the peak, never below the final rate after the warm-up, and monotone on both sides."""
    schedule = Schedule(kind=kind, warmup_steps=warmup, final_fraction=final)
    rates = [rate(schedule, 2.0, step=step, steps=steps) for step in range(1, steps + 1)]
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    assert all(2.0 * final - 1e-12 <= value <= 2.0 + 1e-12 for value in falling)


def test_known_values() -> None:
    """Half-way a cosine is at the middle of peak and final; the warm-up ends at the peak, the run at the final rate."""
    schedule = Schedule(kind="cosine", warmup_steps=10, final_fraction=0.1)
    assert rate(schedule, 1.0, step=1, steps=110) == pytest.approx(0.1)
    assert rate(schedule, 1.0, step=10, steps=110) == pytest.approx(1.0)
    assert rate(schedule, 1.0, step=60, steps=110) == pytest.approx(0.55)
    assert rate(schedule, 1.0, step=110, steps=110) == pytest.approx(0.1)
    assert rate(schedule, 1.0, step=35, steps=110) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_a_run_shorter_than_its_warm_up_only_rises() -> None:
    """Twelve steps of a recipe with forty steps of warm-up are legal."""
    schedule = Schedule(warmup_steps=40)
    assert rate(schedule, 4.0, step=12, steps=12) == pytest.approx(1.2)


def test_the_linear_scaling_rule_scales_and_says_so() -> None:
    """Asked for, it multiplies by the ratio of batches and says what it did; not asked for, nothing happens."""
    scaled, said = peak_rate(SGD(lr=0.1, lr_for_samples=256), global_samples=1024)
    assert scaled == pytest.approx(0.4)
    assert said is not None
    assert "0.4" in said
    assert "1024" in said
    assert peak_rate(SGD(lr=0.1), global_samples=1024) == (0.1, None)
