"""Shares and microbatches are partitions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.cursor import Interval
from shoal.data.order import microbatches, share
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
