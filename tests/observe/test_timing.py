"""Where the time went adds up, and the slowest rank is the one the others wait for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.events import Event
from shoal.observe.record import RankTime, parts_of_step, rank_time, slowest

SECONDS = st.floats(0.001, 1.0)


def timed(step: int, step_s: float, **parts_s: float) -> Event:
    values = {"time/step": step_s} | {f"time/{name}": seconds for name, seconds in parts_s.items()}
    return Event(step=step, time_s=float(step), values=dict(values))


def rank(number: int, *, work_s: float, step_s: float = 1.0) -> RankTime:
    return RankTime(number, 10, step_s, 0.0, work_s, step_s - work_s, 0.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=20))
def test_shares_sum_to_one(times: list[tuple[float, float, float, float]]) -> None:
    """The parts and "other" are the whole of the time, whatever was measured."""
    events = [
        timed(step, a + b + c + d, data=a, forward_backward=b, optimizer=c) for step, (a, b, c, d) in enumerate(times)
    ]
    parts = parts_of_step(events)
    assert [part.key for part in parts] == ["data", "forward_backward", "optimizer", "other"]
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    assert parts[-1].share == pytest.approx(sum(d for *_, d in times) / sum(map(sum, times)))


def test_a_rare_stall_shows_in_the_share_although_its_median_is_zero() -> None:
    """One save of a second in ten steps of a second is a tenth of the time, on the mean 0.1 s, in the median 0."""
    events = [timed(step, 1.0, checkpoint_stall=1.0 if step == 5 else 0.0) for step in range(1, 11)]
    stall = parts_of_step(events)[0]
    assert (stall.share, stall.median_s, stall.mean_s) == pytest.approx((0.1, 0.0, 0.1))


def test_parts_longer_than_their_step_leave_no_negative_rest() -> None:
    """Clocks that overlap by a little make "other" zero, never less."""
    assert parts_of_step([timed(1, 1.0, forward_backward=1.1)])[-1].mean_s == 0.0


def test_without_times_there_are_no_parts() -> None:
    """No timed step, or times that are not finite, give nothing rather than a division by zero."""
    assert parts_of_step([]) == []
    assert parts_of_step([Event(step=1, time_s=0.0, values={"time/step": None})]) == []
    assert rank_time(0, [Event(step=1, time_s=0.0, values={"loss/train": 1.0})]) is None
    assert parts_of_step([timed(1, 0.0)]) == []


def test_work_that_was_computed_again_counts_once() -> None:
    """After a resume, the times of the life that counts are used."""
    events = [timed(1, 1.0), timed(2, 9.0), timed(2, 1.0)]
    assert rank_time(0, events) == RankTime(0, 2, 1.0, 0.0, 0.0, 0.0, 0.0)


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    """Steps last equally long on all ranks: the culprit shows in its own work, by its share above the median."""
    found = slowest([rank(0, work_s=0.8), rank(1, work_s=0.8), rank(2, work_s=0.96), rank(3, work_s=0.8)])
    assert found is not None
    assert found[0].rank == 2
    assert found[1] == pytest.approx(0.2)


def test_no_rank_is_accused_without_cause() -> None:
    """A rank alone, even ranks, and ranks without times have no slowest."""
    assert slowest([rank(0, work_s=0.8)]) is None
    assert slowest([rank(0, work_s=0.80), rank(1, work_s=0.82)]) is None
    assert slowest([rank(0, work_s=0.0), rank(1, work_s=0.0)]) is None
