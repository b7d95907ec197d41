"""Numbers as digits with a base each."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shoal.topology.layout import strides, to_digits

bases_of = st.lists(st.integers(1, 7), max_size=6)


@given(bases_of, st.data())
def test_a_number_is_its_digits_times_the_strides(bases: list[int], data: st.DataObject) -> None:
    """Each digit lies below its base; its stride is how far the number moves with it."""
    number = data.draw(st.integers(0, prod(bases) - 1))
    digits = to_digits(number, bases)
    assert all(0 <= digit < base for digit, base in zip(digits, bases, strict=True))
    assert sum(d * s for d, s in zip(digits, strides(bases), strict=True)) == number


def test_hours_minutes_seconds() -> None:
    """A familiar case: 3,723 seconds are 1 h 2 min 3 s."""
    assert to_digits(3723, (24, 60, 60)) == (1, 2, 3)
    assert strides((24, 60, 60)) == (3600, 60, 1)
