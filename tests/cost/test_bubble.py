"""Bubbles against their papers' tables."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shoal.cost.bubble import bubble_s
from shoal.cost.plan import Schedule

PUBLISHED = Path(__file__).parent.parent / "planner" / "published"
BELOW = 0.03
"""A closed form counts no transfer per hop: 1F1B lies 0.009 to 0.027 below the paper's simulated rate."""


def _bubble(
    schedule: Schedule, pipeline: int, virtual: int = 1, *, f: float = 1.0, b: float = 1.0, w: float = 1.0
) -> float:
    return bubble_s(
        schedule, pipeline=pipeline, virtual_stages=virtual, microbatches=32, forward_s=f, input_s=b, weight_s=w
    )


@pytest.mark.parametrize(
    ("schedule", "virtual", "idle"),
    [
        ("GPipe", 1, 21),
        ("1F1B", 1, 21),
        ("Interleaved1F1B", 3, 7),
        ("ZB-H1", 1, 7),
        ("ZB-H2", 1, 0),
        ("ZBVZeroBubble", 2, 0),
    ],
)
def test_equal_parts_of_one_second(schedule: Schedule, virtual: int, idle: float) -> None:
    """Eight ranks, F = B = W = 1: (p-1) x 3, x 1 for ZB-H1, none for ZB-H2 and ZBV."""
    assert _bubble(schedule, 8, virtual) == idle


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"])
def test_one_rank_never_waits(schedule: Schedule) -> None:
    """No pipeline, no bubble."""
    assert _bubble(schedule, 1) == 0


def test_weight_gradients_that_are_not_there_fill_nothing() -> None:
    """Two microbatches fill two of seven gaps of ZB-H1."""
    sizes = {"pipeline": 8, "virtual_stages": 1, "forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0}
    assert bubble_s("ZB-H1", microbatches=2, **sizes) == 14 - 2


def test_rates_of_zero_bubble_from_its_profiled_times() -> None:
    """1F1B of arXiv:2401.10241, table 5: the closed form is a lower bound and close to it."""
    with open(PUBLISHED / "zero_bubble_profiled_times_and_bubble_rates.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        forward, backward, weight = (float(row[f"T{kind}_ms"]) for kind in "FBW")
        ranks, micro = int(row["PP"]), int(row["num_microbatches"])
        idle = _bubble("1F1B", ranks, f=forward, b=backward, w=weight)
        rate = idle / (micro * (forward + backward + weight) + idle)
        assert float(row["bubble_1F1B"]) - BELOW < rate < float(row["bubble_1F1B"])
