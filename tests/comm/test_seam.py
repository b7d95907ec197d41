"""The seam counts, names culprits and keeps to the conditions it is given."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from shoal.comm.conditions import Conditions, Fault
from shoal.comm.ledger import Entry
from shoal.comm.volume import bytes_sent
from shoal.errors import CollectiveError
from tests.comm.groups import STOPPED_S, replicas
from tests.waiting import NEVER_S


def counted(place) -> tuple[int, int, float]:
    mesh = replicas(place)
    for _ in range(3):
        mesh.world.all_reduce(torch.ones(1000)).wait()
    entry = mesh.ledger.take()["all_reduce"]
    assert mesh.ledger.take() == {}
    return entry.calls, entry.bytes_sent, entry.exposed_s + entry.hidden_s


def test_the_ledger_counts_calls_bytes_and_seconds(ranks) -> None:
    """Three all-reduces of 4,000 bytes on 3 ranks: each sends 2 * (2/3) of it, and each takes time, which is hidden
    where a rank was kept from its wait until the sum was there."""
    for calls, sent, seconds in ranks(3, counted):
        assert (calls, sent) == (3, 3 * bytes_sent("all_reduce", 4000, size=3, backend="gloo"))
        assert seconds > 0


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
    """When a rank dies in mid-run, the survivor learns which one it was and in what operation, not by a timeout."""
    (survived, sentence), (lived, _) = ranks.outcomes(2, under, [Fault("all_reduce", 1, "kill")], 1, NEVER_S)
    assert survived, sentence
    assert not lived
    assert "rank 1 (host" in sentence
    assert "all_reduce number 1" in sentence
    assert "did not come" in sentence


@pytest.mark.slow
def test_a_stopped_rank_is_named_after_the_timeout(ranks) -> None:
    """A rank that stands still (SIGSTOP) is named once the timeout is over, although its connection is alive."""
    ranks._fill(2)
    stopped = ranks.workers[1][0].pid
    (survived, sentence), _ = ranks.outcomes(2, under, [Fault("all_reduce", 1, "stop")], 1, STOPPED_S, lost=[1])
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


def throttled_twice(place, rate: float) -> float:
    mesh = replicas(place, conditions=Conditions(bytes_per_second=rate))
    groups = [mesh.world, mesh.ranks(range(place.size), lane="other")]
    begin_s = time.perf_counter()
    for handle in [group.all_reduce(torch.ones(25_000)) for group in groups]:
        handle.wait()
    return time.perf_counter() - begin_s


def test_two_groups_of_a_rank_share_its_link(ranks) -> None:
    """100,000 bytes in each of two groups, at once, at 400 kB/s: half a second at least."""
    assert min(ranks(2, throttled_twice, 400_000.0)) >= 0.5


def futures(place, rate: float | None, also_wait: bool) -> tuple[float, float, Entry]:
    """Seconds until a future was completed, its tensor's first number, and the ledger."""
    mesh = replicas(place, conditions=Conditions(bytes_per_second=rate) if rate else None)
    begin_s = time.perf_counter()
    work = mesh.world.all_reduce(torch.ones(25_000))
    future = work.get_future()  # type: ignore[attr-defined]
    if also_wait:
        work.wait()
    (total,) = future.wait()
    seconds = time.perf_counter() - begin_s
    work.wait()
    return seconds, float(total[0]), mesh.ledger.take()["all_reduce"]


@pytest.mark.parametrize("also_wait", [False, True])
@pytest.mark.parametrize("rate", [None, 400_000.0])
def test_a_future_keeps_to_the_throttle_and_is_booked_once(ranks, rate: float | None, also_wait: bool) -> None:
    """Completed with the tensor when the wire is through; one call, and one time, which is hidden unless the work is
    waited for as well."""
    for seconds, total, entry in ranks(2, futures, rate, also_wait):
        assert total == 2
        assert seconds >= (0.25 if rate else 0)
        assert (entry.calls, entry.bytes_sent) == (1, 100_000)
        assert 0 < entry.exposed_s + entry.hidden_s <= seconds
        if rate or not also_wait:  # without a throttle the future may come first
            assert (entry.exposed_s > 0) == also_wait


def corrupted_future(place) -> float:
    mesh = replicas(place, conditions=Conditions(faults=[Fault("all_reduce", 0, "corrupt")]))
    (total,) = mesh.world.all_reduce(torch.ones(3)).get_future().wait()  # type: ignore[attr-defined]
    return float(total[0])


def test_a_fault_is_seen_through_a_future(ranks) -> None:
    """A corrupt result is one for those who wait for the future."""
    assert ranks(2, corrupted_future) == [3.0, 3.0]


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"])
def test_one_rank_alone_sends_nothing(operation: str) -> None:
    """A group of one has no wire."""
    assert bytes_sent(operation, 1 << 20, size=1, backend="gloo") == 0
