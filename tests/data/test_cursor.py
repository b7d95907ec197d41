"""The cursor keeps exactly-once under leases, commits, releases and restarts."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.cursor import Cursor, Interval, IntervalSet
from shoal.errors import CorruptCheckpoint

intervals = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda t: Interval(t[0], t[0] + t[1]))


def members(of: IntervalSet) -> set[int]:
    return {position for part in of.parts for position in range(part.start, part.stop)}


@given(st.lists(intervals), intervals, st.integers(1, 9))
def test_interval_sets_are_sets(parts: list[Interval], other: Interval, longest: int):
    """Union, removal, cover, count and gap agree with Python's sets, and the parts stay sorted and apart."""
    stretches = IntervalSet.of(parts)
    oracle = {position for part in parts for position in range(part.start, part.stop)}
    here = set(range(other.start, other.stop))
    assert members(stretches) == oracle
    assert stretches.count == len(oracle)
    assert members(stretches.add(other)) == oracle | here
    assert members(stretches.remove(other)) == oracle - here
    assert stretches.covers(other) == (here <= oracle)
    assert all(a.stop < b.start for a, b in pairwise(stretches.parts))
    gap = stretches.first_gap(longest)
    free = next(p for p in range(100) if p not in oracle)
    assert gap.start == free
    assert 1 <= len(gap) <= longest
    assert not set(range(gap.start, gap.stop)) & oracle
    assert len(gap) == longest or gap.stop in oracle


@given(st.lists(st.tuples(st.sampled_from(["lease", "commit", "release", "restart"]), st.integers(1, 9)), max_size=40))
def test_every_position_is_committed_once(events: list[tuple[str, int]]):
    """Whatever is leased, dropped and restarted: no position is committed twice, and none below the next is lost."""
    cursor, held, committed = Cursor(), [], []
    for event, number in events:
        if event == "lease":
            cursor, interval = cursor.lease(number)
            held.append(interval)
        elif event == "restart":
            cursor, held = Cursor.from_state(json.loads(json.dumps(cursor.to_state()))), []
        elif held:
            interval = held.pop(number % len(held))
            cursor = cursor.commit(interval) if event == "commit" else cursor.release(interval)
            committed += [*range(interval.start, interval.stop)] if event == "commit" else []
    assert len(committed) == len(set(committed)) == cursor.committed.count
    taken = set(committed) | {p for interval in held for p in range(interval.start, interval.stop)}
    assert set(range(cursor.next_position)) <= taken
    assert cursor.next_position not in taken


def test_in_order_leases_follow_each_other():
    """A synchronous run leases one whole stretch after the other."""
    cursor, first = Cursor().lease(10)
    cursor, second = cursor.commit(first).lease(10)
    assert (first, second) == (Interval(0, 10), Interval(10, 20))
    assert cursor.next_position == 20
    assert cursor.committed.count == 10


def test_leases_come_back_first_on_resume():
    """A lease that was never committed is handed out again, before anything new."""
    cursor, _lost = Cursor().lease(4)
    cursor, kept = cursor.lease(4)
    resumed = Cursor.from_state(cursor.commit(kept).to_state())
    assert resumed.next_position == 0
    resumed, first = resumed.lease(10)
    assert first == Interval(0, 4)
    assert resumed.lease(10)[1] == Interval(8, 18)


def test_the_state_is_small_and_json():
    """A cursor of many commits in order is one pair of numbers."""
    cursor = Cursor()
    for _ in range(100):
        cursor, interval = cursor.lease(7)
        cursor = cursor.commit(interval)
    assert json.loads(json.dumps(cursor.to_state())) == {"committed": [[0, 700]]}
    assert cursor == Cursor.at(700)


def test_refusals():
    """Committing twice, or what is not leased, is refused, and so is a lease of nothing."""
    cursor, interval = Cursor().lease(5)
    with pytest.raises(ValueError, match="not wholly leased"):
        cursor.commit(Interval(3, 8))
    done = cursor.commit(interval)
    with pytest.raises(ValueError, match="committed already"):
        done.commit(interval)
    with pytest.raises(ValueError, match="committed already"):
        done.release(interval)
    with pytest.raises(ValueError, match="at least 1"):
        done.lease(0)
    with pytest.raises(ValueError, match="no interval"):
        Interval(3, 2)


@pytest.mark.parametrize("state", [{}, {"committed": [[5, 3]]}, {"committed": [[0, 1.5]]}, {"committed": 3}])
def test_a_damaged_state_is_refused(state: dict):
    """A state that no cursor wrote is an error with a repair, not a guess."""
    with pytest.raises(CorruptCheckpoint, match="another checkpoint"):
        Cursor.from_state(state)
