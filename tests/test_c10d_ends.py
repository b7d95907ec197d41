"""How calls end that nobody answers: timeouts, ranks that die, closed groups, barriers that name who is missing."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.groups import STOPPED_S
from tests.comm.hosts import on_host
from tests.test_c10d_users import HOSTS, MEGABYTE, on_shoal, said_by, work_of
from tests.waiting import HANG_S, NEVER_S, wait_until

SHORT_S = 0.3
"""The timeout of a call that nobody answers."""


def unheeded(place: Any, call: Callable[[], object]) -> tuple[str, float]:
    """What is said of a call that the other ranks do not make, and after how many seconds; those wait for `over`."""
    begin_s = time.monotonic()
    try:
        return said_by(call), time.monotonic() - begin_s
    finally:
        place.store.set("over", "")


def posted_early(rank: int) -> float:
    """A receive is asked for, other messages go back and forth for longer than the timeout, then it is served."""
    late, ping = torch.zeros(1), torch.zeros(1)
    receiving = dist.irecv(late, 1, tag=9) if rank == 0 else None
    until_s = time.monotonic() + 1.5 * STOPPED_S
    go_on = torch.ones(1)
    while go_on:
        go_on.fill_(time.monotonic() < until_s)
        dist.send(go_on, 1, tag=1) if rank == 0 else dist.recv(go_on, 0, tag=1)
        dist.recv(ping, 1, tag=1) if rank == 0 else dist.send(ping, 0, tag=1)
        time.sleep(0.01)
    if receiving is None:
        dist.send(torch.full((1,), 5.0), 0, tag=9)
        return 5.0
    receiving.wait()
    return float(late)


def posted(place: Any) -> float:
    return on_shoal(place, posted_early, timeout_s=STOPPED_S)


@pytest.mark.slow
def test_a_message_is_late_from_when_somebody_waits_for_it(ranks) -> None:
    assert ranks(2, posted) == [5.0] * 2


def unanswered() -> None:
    dist.recv(torch.zeros(1), 1)


def untaken() -> None:
    """A message that is waited for, behind one that is not."""
    first = work_of(dist.isend(torch.zeros(MEGABYTE), 1))
    dist.send(torch.zeros(1), 1)
    first.wait()


def told(place: Any, messages: Callable[[], None]) -> tuple[str, float]:
    """What rank 0 hears, and after how long, of messages that rank 1 neither sends nor takes."""

    def program(rank: int) -> tuple[str, float]:
        if rank == 0:
            return unheeded(place, messages)
        place.store.wait(["over"])
        return "", 0.0

    return on_shoal(place, program, timeout_s=STOPPED_S)


@pytest.mark.slow
@pytest.mark.parametrize("messages", [unanswered, untaken])
def test_a_message_that_does_not_come_or_go_is_named_after_the_timeout(ranks, messages: Callable[[], None]) -> None:
    (said, spent_s), _ = ranks(2, told, messages)
    assert "Timed out after 3 s waiting for rank 1" in said
    assert spent_s > 0.9 * STOPPED_S


def polled(place: Any, dies: bool) -> tuple[bool, str]:
    """Rank 0 asks again and again whether a barrier is over, which rank 1 does not come to."""

    def program(rank: int) -> tuple[bool, str]:
        dist.barrier()
        if rank == 1 and dies:
            os._exit(0)
        if rank == 1:
            place.store.wait(["over"])
            return True, ""
        work: Any = dist.barrier(async_op=True)
        wait_until(work.is_completed)
        said, _ = unheeded(place, lambda: work.wait(timedelta(seconds=0.5)))
        return work.is_success(), said

    return on_shoal(place, program, timeout_s=NEVER_S if dies else STOPPED_S)


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "named"), [(True, "rank 1 of the group is gone"), (False, "Timed out after 3 s")])
def test_who_polls_learns_of_deaths_and_timeouts(ranks, dies: bool, named: str) -> None:
    worked, (success, said) = ranks.outcomes(2, polled, dies)[0]
    assert worked
    assert not success
    assert named in said


def impatient(place: Any, hosts: int, behind: bool) -> tuple[str, float]:
    """A barrier with a timeout of its own; `behind` a call that the others do not make either."""

    def program(rank: int) -> tuple[str, float]:
        dist.barrier(timeout=timedelta(seconds=HANG_S))
        if rank > 0:
            place.store.wait(["over"])
            return "", 0.0
        stuck = dist.all_reduce(torch.ones(1), async_op=True) if behind else None
        heard = unheeded(place, lambda: dist.barrier(timeout=timedelta(seconds=SHORT_S)))
        del stuck
        return heard

    with on_host(f"host-{place.rank * hosts // place.size}"):
        return on_shoal(place, program, timeout_s=NEVER_S)


@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("behind", [False, True])
def test_a_barrier_has_the_timeout_that_it_is_given(ranks, size: int, hosts: int, behind: bool) -> None:
    said, spent_s = ranks(size, impatient, hosts, behind)[0]
    assert "Timed out after" in said
    assert spent_s > 0.9 * SHORT_S


def closed_meanwhile(rank: int, numel: int) -> str:
    """A thread goes on making calls while its group is closed: it is refused, and nothing else happens."""
    group: Any = dist.new_group()
    said: list[str] = []

    def send_on() -> None:
        try:
            while True:
                if numel == 1:
                    group.send([torch.zeros(1)], 1 - rank, 0)
                else:
                    group.allreduce([torch.zeros(numel)]).wait()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=send_on)
    thread.start()
    time.sleep(0.02)
    group.close()
    thread.join(HANG_S)
    return said[0] if said else "goes on"


def closed_often(place: Any, numel: int) -> set[str]:
    return on_shoal(place, lambda rank: {closed_meanwhile(rank, numel) for _ in range(20)}, timeout_s=1.0)


@pytest.mark.parametrize("numel", [1, MEGABYTE])
def test_a_group_may_be_closed_under_a_thread_that_calls(ranks, numel: int) -> None:
    for said in ranks(2, closed_often, numel):
        assert said
        assert all("closed" in each or "Timed out" in each for each in said)


def hurried(place: Any, hosts: int, source: int | None) -> str:
    """Rank 0 waits for the others, who do not come, after the timeout was set to `SHORT_S`: in a sum, or for a message
    of `source`."""

    def program(rank: int) -> str:
        dist.all_reduce(torch.ones(3))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if rank:
            place.store.set(f"summed {rank}", "")
            place.store.wait(["over"])
            return ""
        place.store.wait([f"summed {other}" for other in range(1, place.size)])
        summed = partial(dist.all_reduce, torch.ones(3))
        return unheeded(place, summed if source is None else partial(dist.recv, torch.ones(3), source))[0]

    with on_host(f"host-{place.rank % hosts}"):
        return on_shoal(place, program, timeout_s=NEVER_S)


@pytest.mark.parametrize(("size", "hosts", "source"), [(2, 1, None), (3, 2, None), (2, 1, 1), (3, 2, 1), (3, 2, 2)])
def test_a_timeout_that_is_set_later_is_kept(ranks, size: int, hosts: int, source: int | None) -> None:
    """`_set_pg_timeout`, as with Gloo and NCCL: the next call ends after it, long before the one from the start; a
    message too, inside a host and between two."""
    sentence = ranks(size, hurried, hosts, source)[0]
    assert re.search("[Tt]imed out", sentence), sentence


def failed_again(place: Any, hosts: int, dies: bool) -> list[str]:
    """What the others hear of rank 1, which dies or does not come: in the call that it misses, and in later ones."""

    def program(rank: int) -> list[str]:
        dist.all_reduce(torch.ones(3))
        if rank == 1 and dies:
            os._exit(0)
        if rank == 1:
            for other in (0, 2)[: place.size - 1]:
                place.store.get(f"told {other}")
            return []
        calls = (dist.all_reduce, dist.all_reduce, lambda ones: work_of(dist.all_reduce(ones, async_op=True)).wait())
        said = [said_by(lambda call=call: call(torch.ones(3))) for call in calls]
        said.append(said_by(dist.barrier))
        for peer in set(range(place.size)) - {rank}:
            said += [said_by(lambda of=of, peer=peer: of(torch.ones(3), peer)) for of in (dist.send, dist.recv)]
        place.store.set(f"told {rank}", "")
        return said

    with on_host(f"host-{place.rank % hosts}"):
        return on_shoal(place, program, timeout_s=NEVER_S if dies else STOPPED_S)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("dies", [True, False])
def test_calls_after_a_failure_name_the_same_culprit(ranks, size: int, hosts: int, dies: bool) -> None:
    """The first failure is the group's: whoever calls again hears of it, and of no other rank. A small message
    would fit in memory that is there: its sender hears of it, too."""
    outcomes = ranks.outcomes(size, failed_again, hosts, dies)
    for rank in (0, 2)[: size - 1]:
        survived, said = outcomes[rank]
        assert survived, said
        assert len({each.partition(", in ")[0] for each in said}) == 1, said  # but for the call that hears of it
        assert "no error" not in said
        if hosts == 1:
            assert "rank 1" in said[0]


def sent_to_a_failed_rank(place: Any) -> str:
    """Rank 1 waits in vain for a message, and with that the group has failed there; rank 0, which has made no call
    since, then sends one."""

    def program(rank: int) -> str:
        dist.all_reduce(torch.ones(3))
        if rank:
            said = said_by(lambda: dist.recv(torch.ones(3), 0))
            place.store.set("failed", "")
            place.store.wait(["over"])
            return said
        place.store.get("failed")
        return unheeded(place, lambda: dist.send(torch.ones(3), 1))[0]

    return on_shoal(place, program, timeout_s=STOPPED_S)


@pytest.mark.slow
def test_a_message_to_a_rank_that_has_failed_is_an_error(ranks) -> None:
    """It would lie in the ring for ever."""
    told, late = ranks(2, sent_to_a_failed_rank)
    assert "Timed out" in late
    assert told == "another rank of the group gave up on rank 0"


def monitored(place: Any, hosts: int) -> str:
    """All ranks pass once; then rank 1 does not come, and rank 0 is told who."""

    def program(rank: int) -> str:
        group: Any = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=HANG_S))
        if rank == 1:
            place.store.wait(["over"])
            return ""
        if rank == 2:
            return said_by(lambda: group.monitored_barrier(timedelta(seconds=HANG_S)))
        return unheeded(place, lambda: group.monitored_barrier(timedelta(seconds=SHORT_S)))[0]

    with on_host(f"host-{place.rank % hosts}"):
        return on_shoal(place, program, timeout_s=NEVER_S)


@pytest.mark.parametrize(("size", "hosts"), HOSTS)
def test_a_monitored_barrier_names_who_does_not_come(ranks, size: int, hosts: int) -> None:
    """Called on the group: `dist.monitored_barrier` refuses all backends but one whose name is "gloo"."""
    assert "Rank 1 failed to pass monitoredBarrier" in ranks(size, monitored, hosts)[0]


def monitored_at_first(place: Any, missing: tuple[int, ...], all_ranks: bool) -> list[str]:
    """Groups whose ranks have not spoken yet: those `missing` do not come to the barrier, and all are there in a sum
    behind it."""

    def program(rank: int) -> list[str]:
        said = []
        for number in range(4):
            group: Any = dist.new_group()
            if rank not in missing:
                limit = timedelta(seconds=0.5 if rank == 0 else HANG_S)
                said.append(said_by(lambda group=group, limit=limit: group.monitored_barrier(limit, all_ranks)))
                place.store.set(f"{rank}/{number}", "")
            for other in set(range(place.size)) - set(missing):
                place.store.get(f"{other}/{number}")
            ones = torch.ones(3)
            dist.all_reduce(ones, group=group)
            assert ones.tolist() == [3.0] * 3
        return said

    return on_shoal(place, program, timeout_s=NEVER_S)


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "all_ranks", "named"), [((1,), False, "Rank 1"), ((1, 2), True, "Ranks 1, 2")])
def test_the_first_call_of_a_group_may_be_a_monitored_barrier(
    ranks, missing: tuple[int, ...], all_ranks: bool, named: str
) -> None:
    """It takes as long as it is given, not as the group: four groups, as Gloo's connects at once or waits by chance.
    Collectives go on afterwards."""
    for rank, (survived, said) in enumerate(ranks.outcomes(3, monitored_at_first, missing, all_ranks)):
        assert survived, said
        assert len(said) == (0 if rank in missing else 4)
        sentence = f"{named} failed to pass monitoredBarrier in 500 ms" if rank == 0 else "rank 0 missed rank 1"
        assert all(sentence in one for one in said), said


def monitored_in_groups(place: Any) -> int:
    """How many of many groups pass a barrier over Gloo, which connects each when it first speaks; some have ended."""

    def program(_: int) -> int:
        passed = 0
        for number in range(12):
            group: Any = dist.new_group()
            group.monitored_barrier(timedelta(seconds=HANG_S))
            passed += 1
            if number % 2:
                dist.destroy_process_group(group)
        return passed

    return on_shoal(place, program, timeout_s=NEVER_S)


def test_connections_of_a_group_are_not_taken_for_those_of_another(ranks) -> None:
    """Gloo numbers lazy connections by rank, within a device."""
    assert ranks(2, monitored_in_groups) == [12, 12]
