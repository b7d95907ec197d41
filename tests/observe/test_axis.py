"""An axis holds its values, and its ticks are round numbers on it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.charts import Axis, axis_for, drawable, wants_log

ANY = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30)


@given(ANY, st.booleans(), st.booleans())
def test_every_value_has_its_place(values: list[float], from_zero: bool, may_be_log: bool) -> None:
    """Whatever floats come, places are within 0 and 1 and in the order of the values; ticks are few and on the axis."""
    axis = axis_for(values, from_zero=from_zero, may_be_log=may_be_log)
    places = [axis.place(value) for value in sorted(drawable(values))]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)
    ticks = axis.ticks()
    assert len(ticks) <= 30
    slack = 1e-6 * (abs(axis.low) + abs(axis.high))
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)


def test_a_log_axis_is_chosen_for_what_spans_orders() -> None:
    """A loss from 6 to 1.6 is drawn linearly, one from 600 to 0.01 by its logarithm; one outlier decides nothing."""
    assert not axis_for([6.0, 3.0, 1.6], may_be_log=True).log
    assert axis_for([600.0, 30.0, 1.0, 0.01], may_be_log=True).log
    assert not axis_for([600.0, 0.01]).log
    assert not wants_log(sorted([2.0] * 100 + [500.0]))
    assert not wants_log([0.0, 1.0, 1000.0])


def test_what_lies_outside_is_moved_to_the_edge() -> None:
    """A value beyond the axis is drawn at its nearer end, so that no stroke leaves the plot."""
    for axis in (Axis(1.0, 10.0), Axis(1.0, 10.0, log=True)):
        assert [axis.place(value) for value in (-5.0, 1.0, 10.0, 1e9)] == [0.0, 0.0, 1.0, 1.0]


def test_ticks_are_round() -> None:
    """Steps 0 to 900 are ticked at hundreds, six decades at powers of ten."""
    assert axis_for([0, 900], from_zero=True).ticks(4) == [0, 200, 400, 600, 800]
    assert axis_for([1e-3, 1, 1e3], may_be_log=True).ticks() == [1e-3, 1e-1, 1e1, 1e3]
