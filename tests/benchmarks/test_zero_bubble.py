"""The zero-bubble schedule that follows from times: no bubble where there need be none, within its memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.zero_bubble import Times, longest_s, zero_bubble
from shoal.errors import LayoutError
from shoal.schedules.build import build
from shoal.schedules.table import ScheduleTable
from shoal.schedules.timeline import check

ROUNDING = 1e-9
"""Relative: the same float64 sums in another order."""


def test_equal_times_leave_no_bubble() -> None:
    """F = I = W without transfers and memory for two of 1F1B: every rank is busy from its first action to its last."""
    table = zero_bubble(4, 12, times=Times(forward_s=1, input_s=1, weight_s=1), most_stored=8)
    check(table)
    assert longest_s(table, Times(forward_s=1, input_s=1, weight_s=1)) == pytest.approx(36, rel=ROUNDING)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 6),
    more=st.integers(0, 10),
    weight_s=st.sampled_from([0.4, 0.7, 1.0]),
    send_s=st.sampled_from([0.0, 0.05]),
    twice=st.booleans(),
)
def test_it_is_a_schedule_and_keeps_to_its_memory(
    ranks: int, more: int, weight_s: float, send_s: float, twice: bool
) -> None:
    """Any sizes: all work once, nobody waits for ever, and what F stores and W frees stays below the limit."""
    times = Times(forward_s=1.0, input_s=1.05, weight_s=weight_s, send_s=send_s)
    most = (2 if twice else 1) * ranks
    table = zero_bubble(ranks, ranks + more, times=times, most_stored=most, weight_share=0.5)
    check(table)
    assert max(_stored(table, weight_share=0.5)) <= most + ROUNDING


@pytest.mark.parametrize("weight_s", [0.5, 0.75, 1.0])
def test_it_is_no_slower_than_zb_h2(weight_s: float) -> None:
    """The same memory, times that ZB-H2 does not know: never a longer period."""
    times = Times(forward_s=1.0, input_s=1.0, weight_s=weight_s, send_s=0.04)
    ours = zero_bubble(6, 18, times=times, most_stored=12)
    assert longest_s(ours, times) <= longest_s(build("ZB-H2", ranks=6, microbatches=18), times) * (1 + ROUNDING)


def test_too_little_memory_is_refused() -> None:
    """Less than 1F1B stores cannot be: the sentence says how much."""
    with pytest.raises(LayoutError, match="the first rank of 1F1B stores 4; allow as many"):
        zero_bubble(4, 8, times=Times(forward_s=1, input_s=1, weight_s=1), most_stored=3)


def _stored(table: ScheduleTable, *, weight_share: float) -> list[float]:
    peaks = []
    for row in table.rows:
        held = peak = 0.0
        for action in row:
            held += {"F": 1.0, "I": weight_share - 1, "W": -weight_share, "B": -1.0}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
