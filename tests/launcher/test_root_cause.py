"""Which failure is the cause: pure, over any order of ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.launcher.failure import Failure
from shoal.launcher.root_cause import Exit, exit_code, root_cause


def failure(rank: int, time_ns: int, *, secondary: bool = False, code: int = 1) -> Failure:
    """A record."""
    return Failure(
        rank=rank, host="h", pid=rank, time_ns=time_ns, exit_code=code, kind="E", message="m", secondary=secondary
    )


@given(st.permutations(range(5)), st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_the_cause_is_the_earliest_that_is_not_an_echo(order, times):
    """Whatever the times and the order of arrival: own errors and foreign kills, then echoes, then our own kills."""
    exits = [
        Exit(0, 0, 1, times[0]),
        Exit(1, 1, -9, times[1]),
        Exit(2, 2, 3, times[2]),
        Exit(3, 3, -15, times[3], by_launcher=True),
        Exit(4, 4, 0, times[4]),
    ]
    failures = [failure(0, times[0]), failure(2, times[2], secondary=True, code=3)]
    ranks = [end.exit.rank for end in root_cause(failures, [exits[i] for i in order])]
    assert set(ranks[:2]) == {0, 1}
    assert ranks[2:] == [2, 3]
    if times[0] != times[1]:
        assert ranks[0] == (0 if times[0] < times[1] else 1)


def test_nanoseconds_decide_within_a_second():
    """Two own errors in the same millisecond: the record's time decides, not the order of the processes' ends."""
    ends = root_cause([failure(0, 1_000_000_002), failure(1, 1_000_000_001)], [Exit(0, 0, 1, 5), Exit(1, 1, 1, 6)])
    assert [end.exit.rank for end in ends] == [1, 0]


def test_exit_codes_follow_the_cause():
    """The cause's code, 128 + n for a signal; 75 only when every rank left with 0 or 75; else 0."""

    def code(*codes: int) -> int:
        exits = [Exit(rank, rank, code, rank) for rank, code in enumerate(codes)]
        return exit_code(exits, root_cause([], exits))

    assert code(0, 0) == 0
    assert code(75, 0) == 75
    assert code(75, 75) == 75
    assert code(75, 4) == 4
    assert code(0, -9) == 137
    assert code(5, -9) == 5
