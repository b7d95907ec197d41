"""Sides take their steps in turn."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.bench import groups
from shoal.bench.groups import WARM_UP_STEPS, interleaved


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The k-th step of "a" takes 10 k seconds, that of "b" k seconds."""
    counters = {"a": iter(range(0, 1000, 10)), "b": iter(range(100))}
    monkeypatch.setattr(groups, "slowest", lambda step, clock: float(step()))
    return {name: lambda name=name: next(counters[name]) for name in counters}


def test_every_turn_has_all_that_are_compared(sides: dict[str, Any]) -> None:
    """Warm-up turns are not returned; a side that is not compared is in every third turn."""
    found = interleaved(sides, None, pairs=6, always=["b"])  # type: ignore[arg-type]
    assert [turn["b"] for turn in found] == [float(WARM_UP_STEPS + k) for k in range(6)]
    assert ["a" in turn for turn in found] == [True, False, False] * 2


def test_a_warm_step_follows_one_of_the_same_side(sides: dict[str, Any]) -> None:
    """The mean of the last two of three steps in a row."""
    found = interleaved(sides, None, pairs=2, always=["a", "b"], warm=True)  # type: ignore[arg-type]
    firsts = [3 * (WARM_UP_STEPS + k) for k in range(2)]
    assert found == [{"a": 10 * (first + 1.5), "b": first + 1.5} for first in firsts]
