"""Curves, heat maps and the goodput waterfall agree with a plain computation over all events."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.events import Event, Tail, read_events
from shoal.page.history import History
from shoal.page.lead import Lead
from shoal.page.rank_times import PARTS, RankTimes
from tests.page.runs import STEP_S, write_run

EXACT = 1e-9  # sums of the same floats in another order


@given(values=st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=200), limit=st.integers(2, 20))
def test_buckets_hold_every_value_once(values: list[float], limit: int) -> None:
    """However the buckets were merged: counts, sum, lowest and highest are those of all finite values."""
    history = History(limit)
    for step, value in enumerate(values, start=1):
        history.add(step, value)
    finite = [value for value in values if math.isfinite(value)]
    points = history.points()
    assert len(points) <= limit
    assert history.count() == len(finite)
    assert history.total() == pytest.approx(math.fsum(finite), rel=EXACT, abs=1e-3 * EXACT * len(values) * 1e6)
    assert points[-1][0] == len(values)
    assert [point[0] for point in points] == sorted(point[0] for point in points)
    if finite:
        assert min(point[2] for point in points if point[2] is not None) == min(finite)
        assert max(point[3] for point in points if point[3] is not None) == max(finite)


def test_a_short_run_is_kept_as_it_is() -> None:
    """Up to the limit a bucket is one step, and a value that is not finite is a gap."""
    history = History(limit=8)
    for step, value in ((1, 3.0), (2, math.nan), (3, 1.0)):
        history.add(step, value)
    assert history.points() == [(1, 3.0, 3.0, 3.0), (2, None, None, None), (3, 1.0, 1.0, 1.0)]
    history.void_after(1)
    assert history.points() == [(1, 3.0, 3.0, 3.0)]


def test_a_tail_gives_every_whole_line_once(tmp_path: Path) -> None:
    """Whatever pieces the file grows by; a torn line waits for its end, and a file that shrank is read anew."""
    path = tmp_path / "file"
    tail = Tail(path)
    assert list(tail.lines()) == []
    text = b"".join(b"line %d\n" % index for index in range(50))
    found: list[bytes] = []
    for end in (3, 7, 8, 90, len(text)):
        path.write_bytes(text[:end])
        found += tail.lines()
    assert found == text.splitlines()
    path.write_bytes(b"new\n")
    assert list(tail.lines()) == [b"new"]


def test_the_waterfall_adds_up(tmp_path: Path) -> None:
    """A killed run that goes on 5 steps before its end, 10 s later: each part is what the events say, and the parts
    are the whole."""
    write_run(tmp_path, steps=60, restart_at=30, nan_at=50)
    lead = Lead()
    events = read_events(tmp_path)
    for event in events:
        lead.add(event)
    fall = lead.waterfall()
    assert fall is not None
    near = {"abs": 1e-3}  # a step's seconds are kept in single precision, and its end is a Unix time
    assert fall.whole_s == pytest.approx(6.5 + 10, **near)
    assert fall.redone_s == pytest.approx(5 * STEP_S, **near)
    assert fall.restarting_s == pytest.approx(10, **near)
    assert fall.data_s == pytest.approx(60 * 0.002, **near)
    assert fall.stall_s == pytest.approx(2 * 0.003, **near)
    assert fall.skipped_s == pytest.approx(0.098, **near)
    assert fall.trained_s == pytest.approx(6.0 - 0.12 - 0.006 - 0.098, **near)
    parts = fall.trained_s + fall.data_s + fall.stall_s + fall.skipped_s + fall.redone_s + fall.restarting_s
    assert parts + fall.other_s == pytest.approx(fall.whole_s, rel=EXACT)
    assert lead.attempts == 2
    assert lead.restarts == [25]
    assert lead.nonfinite_steps == [50]


def test_a_restart_voids_what_it_computes_again() -> None:
    """The second attempt's values stand, and the steps between its start and the first attempt's end are gone."""
    lead = Lead()
    for step in (1, 2, 3):
        lead.add(Event(step, float(step), 0, {"loss/train": 10.0 * step}))
    lead.add(Event(1, 4.0, 1, {}))
    lead.add(Event(2, 5.0, 1, {"loss/train": 7.0}))
    assert [point[:2] for point in lead.series["loss/train"].points()] == [(1, 10.0), (2, 7.0)]


def test_a_figure_that_a_restart_takes_back_is_not_shown() -> None:
    """The held-out loss of a step that is computed again gives way to that of the last step which stands."""
    lead = Lead()
    for step in (1, 2, 3):
        lead.add(Event(step, float(step), 0, {"loss/train": 10.0 * step}))
        lead.add(Event(step, float(step), 0, {"loss/eval": 20.0 * step}))
    lead.add(Event(1, 4.0, 1, {}))
    assert lead.last == {"loss/train": 10.0, "loss/eval": 20.0}
    lead.add(Event(2, 5.0, 1, {"loss/train": 7.0}))
    assert lead.last == {"loss/train": 7.0, "loss/eval": 20.0}


def test_the_slow_rank_its_part_and_its_first_step_are_named() -> None:
    """Rank 2 of five takes 40 ms longer in forward and backward from step 300 of 400 on, whatever the columns' width;
    a step that was computed again counts once."""
    times = RankTimes(columns=32)
    times.add_ranks(range(5))
    for rank in range(5):
        steps = [*range(1, 251), *range(240, 401)]
        seconds = [(0.1, 0.002, 0.06 + 0.04 * (rank == 2 and step >= 300), 0.03, 0.005, 0.0) for step in steps]
        for begin in range(0, len(steps), 37):
            times.add(rank, steps[begin : begin + 37], seconds[begin : begin + 37])
    (slow,) = times.slow_ranks()
    assert (slow.rank, slow.part) == (2, "forward_backward")
    assert slow.excess == pytest.approx(0.04 / 0.067)
    assert abs(slow.since_step - 300) <= times.width
    heat = times.heat_map()
    assert heat is not None
    assert heat.rows == [f"rank {rank}" for rank in range(5)]
    assert heat.last_steps[-1] == 400
    assert heat.excess["work"][2][-1] == pytest.approx(0.4)
    assert heat.excess["work"][1][-1] == 0.0
    assert set(heat.excess) == {"work", *PARTS}


def test_of_two_ranks_the_slower_is_compared_with_the_faster() -> None:
    """As the report does it: twice the work is 100 % more, not 33 % more than the mean of both."""
    times = RankTimes()
    times.add_ranks(range(2))
    for rank in range(2):
        times.add(rank, [1, 2], [(0.1, 0.0, 0.04 * (1 + rank), 0.0, 0.0, 0.0)] * 2)
    (slow,) = times.slow_ranks()
    assert (slow.rank, slow.excess) == (1, pytest.approx(1.0))


def test_many_ranks_share_rows_and_the_slowest_shows() -> None:
    """Of 200 ranks each row stands for four neighbours, by the one that takes longest."""
    times = RankTimes()
    times.add_ranks(range(200))
    for rank in range(200):
        times.add(rank, [1, 2], [(0.1, 0.0, 0.05 + 0.02 * (rank == 101), 0.0, 0.0, 0.0)] * 2)
    heat = times.heat_map()
    assert heat is not None
    assert len(heat.rows) == 50
    hot = [row for row, cells in zip(heat.rows, heat.excess["work"], strict=True) if (cells[-1] or 0) > 0.1]
    assert hot == ["ranks 100–103"]
