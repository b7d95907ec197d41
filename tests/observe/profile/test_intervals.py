"""Spans of time against a set of ticks, which cannot be wrong."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.profile.split import Spans, difference, intersection, length, union

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def ticks(spans: list[tuple[float, float]]) -> set[int]:
    """The whole numbers t with [t, t + 1] inside."""
    return {t for begin, end in spans for t in range(int(begin), int(end))}


def apart(spans: Spans) -> bool:
    """Sorted, and no two touch."""
    return all(a[1] < b[0] for a, b in pairwise(spans))


@given(SPANS, SPANS)
def test_spans_are_sets_of_ticks(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    """Union, intersection, difference and length are those of the sets."""
    one, other = union(first), union(second)
    assert apart(one)
    assert ticks(one) == ticks(first)
    assert ticks(intersection(one, other)) == ticks(first) & ticks(second)
    assert ticks(difference(one, other)) == ticks(first) - ticks(second)
    assert length(one) == len(ticks(first))
