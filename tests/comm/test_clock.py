"""Clocks of ranks, compared through the store."""

from __future__ import annotations

import time

from shoal.comm.clock import ClockOffset, measure_offset, offset_of
from tests.ranks import TestPlace

AHEAD_S = 5.0


def _measured(place: TestPlace) -> ClockOffset:
    """Every rank's clock is five seconds ahead of the rank before it."""
    return measure_offset(
        place.store, rank=place.rank, ranks=place.size, name="test", now=lambda: time.time() + AHEAD_S * place.rank
    )


def test_clocks_that_differ_are_found_to_do_so(ranks) -> None:
    """To the error that is stated, which is less than what they differ by; rank 0 has its own clock."""
    found = ranks(3, _measured)
    assert found[0] == ClockOffset(0.0, 0.0)
    for rank in (1, 2):
        assert abs(found[rank].offset_s + AHEAD_S * rank) <= found[rank].error_s < AHEAD_S


def test_the_fastest_exchange_counts_and_less_than_its_error_is_nothing() -> None:
    """Of exchanges of 2 s and 0.5 s the second counts; an offset below half an exchange is zero."""
    assert offset_of([(0.0, 9.0, 2.0), (10.0, 13.25, 10.5)]) == ClockOffset(3.0, 0.25)
    assert offset_of([(10.0, 10.2, 10.5)]) == ClockOffset(0.0, 0.25)
