"""Learning rates."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.config import SGD, AdamW, Phase, Schedule
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


PLAIN = {
    "stable": (Schedule(kind="stable", warmup_steps=10, decay_fraction=0.5, final_fraction=0.2),
               {60: 1, 85: 0.6, 110: 0.2}),
    "polynomial": (Schedule(kind="polynomial", power=3.0, final_fraction=0), {50: 1 / 8, 75: 1 / 64, 100: 0}),
    "step": (Schedule(kind="step", milestones=(30, 60)), {30: 1, 31: 0.1, 60: 0.1, 61: 0.01}),
    "inverse_sqrt": (Schedule(kind="inverse_sqrt", warmup_steps=4), {4: 1, 16: 0.5, 64: 0.25}),
    "one_cycle": (
        Schedule(kind="one_cycle", warmup_steps=20, initial_fraction=0.2, final_fraction=0),
        {10: 0.6, 20: 1, 60: 0.5, 100: 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN)
def test_known_values_of_other_shapes(kind: str) -> None:
    """By hand, of 100 steps, or 110 where there is a warm-up of ten."""
    schedule, values = PLAIN[kind]
    for step, wanted in values.items():
        assert rate(schedule, 2.0, step=step, steps=max(100, max(values))) == pytest.approx(2 * wanted), step


def test_phases_follow_each_other() -> None:
    """Each begins where the last one ended, and the last takes what is left."""
    phases = (
        Phase(kind="constant", steps=10),
        Phase(kind="linear", final_fraction=0.5, steps=10),
        Phase(kind="constant", steps=5),
        Phase(kind="cosine", final_fraction=0.0),
    )
    schedule = Schedule(kind="chained", warmup_steps=5, phases=phases)
    found = {step: rate(schedule, 1.0, step=step, steps=50) for step in (5, 15, 20, 25, 30, 40, 50)}
    assert found == pytest.approx({5: 1, 15: 1, 20: 0.75, 25: 0.5, 30: 0.5, 40: 0.25, 50: 0})


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "cosine", "power": 3.0},
        {"kind": "step"},
        {"kind": "step", "milestones": (5, 2)},
        {"kind": "chained"},
        {"kind": "chained", "phases": (Phase(kind="constant", steps=4),)},
        {"kind": "chained", "phases": (Phase(kind="constant"), Phase(kind="constant"))},
    ],
)
def test_a_key_of_another_shape_is_refused(keys) -> None:
    """And a shape without what it needs."""
    with pytest.raises(ValueError, match=r"kind = |phase"):
        Schedule(**keys)


def test_the_square_root_rule_scales_and_says_so() -> None:
    """Four times the batch, twice the rate."""
    scaled, said = peak_rate(AdamW(lr=0.1, lr_for_samples=256, lr_scaling="square_root"), global_samples=1024)
    assert scaled == pytest.approx(0.2)
    assert said is not None
    assert said.startswith("square root")
