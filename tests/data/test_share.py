"""Shares and microbatches are partitions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.cursor import Interval
from shoal.data.order import divided_by_speed, microbatches, share
from shoal.errors import ConfigError


@given(start=st.integers(0, 10**9), groups=st.integers(0, 200), group=st.integers(1, 8), replicas=st.integers(1, 17))
def test_shares_partition_the_step(start: int, groups: int, group: int, replicas: int):
    """In order, the replicas' shares are the interval, cut between groups; sizes differ by one group at most."""
    step = Interval(start, start + groups * group)
    parts = [share(step, replicas=replicas, replica=i, group=group) for i in range(replicas)]
    assert parts[0].start == step.start
    assert parts[-1].stop == step.stop
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert all(len(part) % group == 0 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= group


@given(start=st.integers(0, 10**9), length=st.integers(0, 300), micro=st.integers(1, 50))
def test_microbatches_partition_the_share(start: int, length: int, micro: int):
    """Microbatches follow each other, are full but for the last, and none is empty."""
    cuts = microbatches(Interval(start, start + length), micro)
    assert [p for cut in cuts for p in range(cut.start, cut.stop)] == list(range(start, start + length))
    assert all(len(cut) == micro for cut in cuts[:-1])
    assert all(1 <= len(cut) <= micro for cut in cuts)


def test_refusals():
    """Broken groups are the run file's fault, an impossible replica or microbatch the program's."""
    with pytest.raises(ConfigError, match="multiple of 4"):
        share(Interval(0, 10), replicas=2, replica=0, group=4)
    with pytest.raises(ValueError, match="replica 2 of 2"):
        share(Interval(0, 10), replicas=2, replica=2)
    with pytest.raises(ValueError, match="at least 1"):
        microbatches(Interval(0, 10), 0)


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0, 0.25], [5.0, 1e-6, 1.0], [2.0], [0.1] * 7])
@pytest.mark.parametrize("groups", [7, 64, 1000])
def test_parts_follow_speeds(groups: int, speeds: list[float]) -> None:
    """They lie one behind the other and cover the step, each has something, and none is more than one group off its
    share of what is left when each has got its least.
    """
    whole, group = Interval(24, 24 + 3 * groups), 3
    parts = [share(whole, replicas=len(speeds), replica=k, group=group, speeds=speeds) for k in range(len(speeds))]
    assert [part.start for part in parts] == [whole.start, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == whole.stop
    counts = [len(part) // group for part in parts]
    assert all(len(part) == group * count >= group for part, count in zip(parts, counts, strict=True))
    assert counts == divided_by_speed(groups, speeds)
    if min(speeds) * groups >= sum(speeds):
        exact = [groups * speed / sum(speeds) for speed in speeds]
        assert all(abs(count - part) <= 1 for count, part in zip(counts, exact, strict=True))


@pytest.mark.parametrize("speeds", [[1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")], [1.0], [1.0] * 9])
def test_speeds_that_divide_nothing_are_refused(speeds: list[float]) -> None:
    """One for each of two replicas, positive and finite."""
    with pytest.raises(ValueError, match=r"speed|cut"):
        share(Interval(0, 8), replicas=len(speeds) if len(speeds) > 2 else 2, replica=0, speeds=speeds)
