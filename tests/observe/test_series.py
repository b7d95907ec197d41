"""Curves that are drawn say what was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.events import mean, median, smooth, thin

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)
RELATIVE = 1e-9  # sums of at most 60 float64 numbers


@given(st.floats(-1e6, 1e6), st.integers(1, 50), st.floats(0.5, 100))
def test_a_constant_stays_what_it_is(value: float, length: int, half_life: float) -> None:
    """Smoothing is not biased at either end: a constant comes back, from its first value on."""
    assert smooth([value] * length, half_life=half_life) == pytest.approx([value] * length, rel=RELATIVE)


@given(VALUES, st.floats(0.5, 20))
def test_smoothing_is_the_weighted_mean_of_its_definition(values: list[float], half_life: float) -> None:
    """The running sums give sum d^(t-s) x_s / sum d^(t-s) over s <= t, computed here as it is written."""
    decay = 0.5 ** (1 / half_life)
    expected = []
    for here in range(len(values)):
        weights = [decay ** (here - there) for there in range(here + 1)]
        expected.append(math.fsum(w * x for w, x in zip(weights, values[: here + 1], strict=True)) / math.fsum(weights))
    assert smooth(values, half_life=half_life) == pytest.approx(expected, rel=RELATIVE, abs=1e-3)


@given(VALUES, st.integers(0, 60), st.floats(0.5, 20))
def test_smoothing_is_causal(values: list[float], cut: int, half_life: float) -> None:
    """What comes later changes nothing of the curve before it."""
    assert smooth(values, half_life=half_life)[:cut] == smooth(values[:cut], half_life=half_life)


def test_a_skipped_step_is_a_gap_and_no_value() -> None:
    """NaN and infinity count in nothing, and the curve invents no value in their place."""
    curve = smooth([2.0, math.nan, 2.0, math.inf, 2.0], half_life=3)
    assert [math.isnan(value) for value in curve] == [False, True, False, True, False]
    assert curve[::2] == pytest.approx([2.0] * 3)
    assert median([math.nan, 3.0, 1.0, 2.0]) == 2.0
    assert mean([math.inf, 3.0, 1.0]) == 2.0
    assert median([math.nan]) is None
    assert mean([]) is None


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(2, 40))
def test_a_thinned_curve_keeps_its_extremes(values: list[float], limit: int) -> None:
    """At most `limit` points, all of the original, in order, among them the lowest and the highest value."""
    steps = list(range(len(values)))
    points = thin(steps, values, limit=limit)
    assert len(points) <= limit
    assert points == sorted(points)
    assert set(points) <= set(zip(steps, values, strict=True))
    if values:
        assert {min(values), max(values)} <= {value for _, value in points}


def test_a_thinned_curve_leaves_out_what_is_no_number() -> None:
    """NaN and infinity are no points, however few there are."""
    assert thin([1, 2, 3], [1.0, math.nan, math.inf], limit=10) == [(1, 1.0)]
