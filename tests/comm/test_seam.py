"""The seam counts, names culprits and keeps to the conditions it is given."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from shoal.comm.conditions import Conditions, Fault
from shoal.comm.volume import bytes_sent
from shoal.errors import CollectiveError
from tests.comm.groups import replicas


def counted(place) -> tuple[int, int, float]:
    mesh = replicas(place)
    for _ in range(3):
        mesh.world.all_reduce(torch.ones(1000)).wait()
    entry = mesh.ledger.take()["all_reduce"]
    assert mesh.ledger.take() == {}
    return entry.calls, entry.bytes_sent, entry.exposed_s


def test_the_ledger_counts_calls_bytes_and_seconds(ranks) -> None:
    """Three all-reduces of 4,000 bytes on 3 ranks: each sends 2 * (2/3) of it, and waiting takes time."""
    for calls, sent, exposed_s in ranks(3, counted):
        assert (calls, sent) == (3, 3 * bytes_sent("all_reduce", 4000, size=3, backend="gloo"))
        assert exposed_s > 0


def under(place, faults: list[Fault], faulty_rank: int, timeout_s: float) -> str:
    conditions = Conditions(faults=faults) if place.rank == faulty_rank else None
    mesh = replicas(place, timeout_s=timeout_s, conditions=conditions)
    mesh.world.all_reduce(torch.ones(3)).wait()
    try:
        mesh.world.all_reduce(torch.ones(3)).wait()
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_killed_rank_is_named_by_the_others(ranks) -> None:
    """When a rank dies in mid-run, the survivor learns in seconds which one it was and in what operation."""
    begin_s = time.monotonic()
    (survived, sentence), (lived, _) = ranks.outcomes(2, under, [Fault("all_reduce", 1, "kill")], 1, 20.0)
    assert survived, sentence
    assert not lived
    assert "rank 1 (host" in sentence
    assert "all_reduce number 1" in sentence
    assert "did not come" in sentence
    assert time.monotonic() - begin_s < 10


def test_a_stopped_rank_is_named_after_the_timeout(ranks) -> None:
    """A rank that stands still (SIGSTOP) is named once the timeout is over, although its connection is alive."""
    ranks._fill(2)
    stopped = ranks.workers[1][0].pid
    (survived, sentence), _ = ranks.outcomes(2, under, [Fault("all_reduce", 1, "stop")], 1, 1.0, timeout_s=8.0)
    assert survived, sentence
    assert "rank 1 (host" in sentence
    assert "did not come" in sentence
    with pytest.raises(ProcessLookupError):  # the pool has ended it, stopped as it was
        os.kill(stopped, signal.SIGKILL)


def throttled(place, rate: float) -> float:
    mesh = replicas(place, conditions=Conditions(bytes_per_second=rate))
    begin_s = time.perf_counter()
    mesh.world.all_reduce(torch.ones(25_000)).wait()
    return time.perf_counter() - begin_s


def test_a_throttled_wire_is_no_faster_than_its_rate(ranks) -> None:
    """100,000 bytes over 2 ranks send 100,000 bytes each: at 400 kB/s that takes a quarter of a second at least."""
    assert min(ranks(2, throttled, 400_000.0)) >= 0.25


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"])
def test_one_rank_alone_sends_nothing(operation: str) -> None:
    """A group of one has no wire."""
    assert bytes_sent(operation, 1 << 20, size=1, backend="gloo") == 0
