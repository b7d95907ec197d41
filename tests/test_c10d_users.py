"""What programs do beside training: futures, messages in any order, mistakes, ends."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import shoal.c10d  # noqa: F401  (the backend's name)
from tests.comm.groups import STOPPED_S
from tests.comm.hosts import on_host
from tests.comm.shm.test_group import options
from tests.comm.shm.test_window import CPU, LARGE
from tests.waiting import HANG_S, NEVER_S, wait_until

MEGABYTE = 1 << 20
SHORT_S = 0.3
"""The timeout of a call that nobody answers."""


def work_of(call: dist.Work | None) -> dist.Work:
    """The work of an asynchronous call, whose annotation says that it may be missing: outside the group it is."""
    assert call is not None
    return call


def on_shoal(place: Any, program: Callable[..., Any], timeout_s: float = HANG_S) -> Any:
    """What `program(rank)` returns between making and destroying the default group. `timeout_s` bounds its calls, not
    the ranks' way to each other, which is long on a busy machine."""
    dist.init_process_group(
        "shoal", store=place.store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=HANG_S)
    )
    if timeout_s < HANG_S:
        dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    try:
        return program(place.rank)
    finally:
        dist.destroy_process_group()


def all_reduced(value: float) -> torch.futures.Future:
    future = dist.all_reduce(torch.full((3,), value), async_op=True)
    assert future is not None
    return future.get_future()


def chained(rank: int) -> list[float]:
    """A sum whose callback makes a call and waits for its future, as PowerSGD's does. Rank 1 comes later each time."""

    def again(summed: torch.futures.Future) -> Tensor:
        time.sleep(0.1 * rank)
        return all_reduced(float(summed.value()[0][0])).wait()[0]

    chains = []
    for value in (1.0, 10.0):
        time.sleep(0.1 * rank)
        chains.append(all_reduced(value).then(again).then(lambda last: float(last.value()[0])))
        chains[-1].wait()
    return [chain.wait() for chain in chains]


def test_a_callback_may_wait_for_another_future(ranks) -> None:
    assert ranks(2, on_shoal, chained) == [[4.0, 40.0]] * 2


def chained_between_hosts(place: Any) -> list[float]:
    with on_host(f"host-{place.rank // 2}"):
        return on_shoal(place, lambda rank: chained(int(rank > 0)))


def test_a_callback_may_wait_for_another_future_between_hosts(ranks) -> None:
    assert ranks(4, chained_between_hosts) == [[16.0, 160.0]] * 4


def profiled(rank: int) -> set[str]:
    """The ranges that PyTorch's profiler shows of every kind of call."""
    one, many, other = torch.ones(4), torch.ones(8), [torch.ones(4), torch.ones(4)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(one)
        dist.all_reduce(one, async_op=True).wait()  # type: ignore[union-attr]
        dist.broadcast(one, 0)
        dist.reduce(one, 0)
        dist.all_gather(other, one)
        dist.all_gather_into_tensor(many, one)
        dist.reduce_scatter_tensor(one, many)
        dist.all_to_all_single(many, many.clone())
        dist.gather(one, other if rank == 0 else None, 0)
        dist.scatter(one, other if rank == 0 else None, 0)
        dist.send(one, 1) if rank == 0 else dist.recv(one, 0)
        dist.barrier()
    return {event.key for event in profile.key_averages() if event.key.startswith("shoal:")}


RANGES = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
}


def test_the_profiler_shows_every_call(ranks) -> None:
    sender, receiver = ranks(2, on_shoal, profiled, timeout_s=180)
    assert sender == {f"shoal:{name}" for name in (*RANGES, "send")}
    assert receiver == {f"shoal:{name}" for name in (*RANGES, "recv")}


def crossed(rank: int) -> list[float]:
    """The future of a message that comes last, asked for first."""
    late, total, go = torch.zeros(1), torch.ones(1), torch.zeros(1)
    if rank == 0:
        receiving = work_of(dist.irecv(late, 1)).get_future()
        summing = work_of(dist.all_reduce(total, async_op=True)).get_future()
        summing.wait()
        dist.send(go, 1)
        receiving.wait()
    else:
        time.sleep(0.2)
        dist.all_reduce(total)
        dist.recv(go, 0)
        dist.send(torch.full((1,), 7.0), 0)
        late.fill_(7.0)
    return [*total.tolist(), *late.tolist()]


def test_futures_of_messages_hold_up_no_others(ranks) -> None:
    assert ranks(2, on_shoal, crossed) == [[2.0, 7.0]] * 2


MISTAKES: dict[str, Callable[[int], Any]] = {
    "sends itself": lambda rank: dist.all_to_all_single(
        torch.empty(4), torch.ones(4), *(([1, 3], [3, 1]) if rank == 0 else ([3, 1], [1, 3]))
    ),
    "2 tensors for 3": lambda rank: dist.all_gather([torch.empty(2)] * 2, torch.ones(2)),
    "1 tensors for": lambda rank: dist.all_gather([torch.empty(2)], torch.ones(2)),
    "reduce_scatter: 1 tensors": lambda rank: dist.reduce_scatter(torch.empty(2), [torch.ones(2)]),
    "on meta": lambda rank: dist.broadcast(torch.empty(4, device="meta"), 0),
    "tensor on meta": lambda rank: dist.send(torch.empty(4, device="meta"), 1 - rank),
}


def mistaken(mistake: str) -> Callable[[int], tuple[str, float]]:
    def program(rank: int) -> tuple[str, float]:
        said = "nothing"
        try:
            MISTAKES[mistake](rank)
        except (ValueError, RuntimeError) as error:
            said = str(error)
        total = torch.ones(1)
        dist.all_reduce(total)
        return said, float(total)

    return program


def mistake_of(place: Any, mistake: str) -> tuple[str, float]:
    return on_shoal(place, mistaken(mistake))


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "2 tensors for 3"])
def test_mistakes_are_named_and_do_no_harm(ranks, mistake: str) -> None:
    """Before anything is written or sent: the group goes on."""
    for said, total in ranks(2, mistake_of, mistake):
        assert mistake in said
        assert total == 2.0


def test_too_few_tensors_are_named(ranks) -> None:
    assert all("2 tensors for 3 ranks" in said for said, _ in ranks(3, mistake_of, "2 tensors for 3"))


def rooted(rank: int) -> list[str]:
    """Lists of the wrong length at a root; the other rank makes no call."""
    said = []
    for call in (
        lambda: dist.gather(torch.ones(2), [torch.empty(2)], dst=0),
        lambda: dist.scatter(torch.empty(2), [torch.ones(2)] * 3, src=0),
    ):
        if rank == 0:
            with pytest.raises(ValueError, match="for 2 ranks"):
                call()
            said.append("refused")
    dist.barrier()
    return said


def test_roots_give_a_tensor_for_each_rank(ranks) -> None:
    assert ranks(2, on_shoal, rooted)[0] == ["refused"] * 2


def unasked_first(rank: int) -> float:
    """A message that nobody asks for yet fills the ring before one that is asked for; then all meet in a barrier."""
    first, second = torch.full((700_000,), 1, dtype=torch.uint8), torch.full((400_000,), 2, dtype=torch.uint8)
    if rank == 1:
        got, early = torch.zeros_like(second), torch.zeros_like(first)
        receiving = work_of(dist.irecv(got, 0, tag=2))
        dist.barrier()
        dist.recv(early, 0, tag=1)
        receiving.wait()
        return float(got.sum() + early.sum())
    time.sleep(0.3)
    sending = work_of(dist.isend(first, 1, tag=1))
    dist.send(second, 1, tag=2)
    dist.barrier()
    sending.wait()
    return float(first.sum() + second.sum())


def test_a_message_behind_one_that_nobody_asks_for_comes_through(ranks) -> None:
    assert ranks(2, on_shoal, unasked_first) == [1_500_000.0] * 2


def unwritable(rank: int) -> list[float]:
    """A result that cannot be put where it belongs: its wait says so, and later calls work."""
    tensor = torch.ones(1).expand(4)
    work = work_of(dist.all_reduce(tensor, async_op=True))
    with pytest.raises(RuntimeError, match="single memory location"):
        work.wait()
    with pytest.raises(RuntimeError, match="single memory location"):
        work.wait()
    total = torch.ones(3)
    dist.all_reduce(total)
    return total.tolist()


def test_a_result_that_cannot_be_written_is_that_call_s_alone(ranks) -> None:
    assert ranks(2, on_shoal, unwritable) == [[2.0] * 3] * 2


def kept_alive(rank: int) -> int:
    """Outputs of calls that are over, while a receive is not."""
    last = torch.zeros(1)
    receiving = dist.irecv(last, 1, tag=99) if rank == 0 else None
    alive = []
    for number in range(60):
        output = torch.empty(64)
        work = work_of(dist.all_gather_into_tensor(output, torch.ones(32), async_op=True))
        if number % 2:
            work.wait()
        alive.append(weakref.ref(output))
        del output, work
    dist.barrier()
    work_of(dist.barrier(async_op=True)).wait()
    gc.collect()
    left = sum(ref() is not None for ref in alive)
    if receiving is None:
        dist.send(last, 0, tag=99)
    else:
        receiving.wait()
    return left


def test_a_receive_under_way_keeps_no_other_tensors(ranks) -> None:
    """Those of works that nobody waited for go a few at a time, with the calls that follow; only of a few numbers are
    some kept (`SmallWorks`)."""
    assert max(ranks(2, on_shoal, kept_alive)) < 8


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
        begin_s = time.monotonic()
        if rank == 1:
            place.store.wait(["told"])
            return "", 0.0
        try:
            messages()
        except RuntimeError as error:
            return str(error), time.monotonic() - begin_s
        finally:
            place.store.set("told", "")
        return "nothing", 0.0

    return on_shoal(place, program, timeout_s=STOPPED_S)


@pytest.mark.slow
@pytest.mark.parametrize("messages", [unanswered, untaken])
def test_a_message_that_does_not_come_or_go_is_named_after_the_timeout(ranks, messages: Callable[[], None]) -> None:
    (said, spent_s), _ = ranks(2, told, messages)
    assert "Timed out after 3 s waiting for rank 1" in said
    assert spent_s > 0.9 * STOPPED_S


def interrupting(_: object) -> bool:
    raise KeyboardInterrupt


def interrupted_forgetting(rank: int) -> tuple[bool, float]:
    """A signal's exception while a call looks after the works of earlier ones."""
    group: Any = dist.group.WORLD
    transport, got = group._transport, torch.zeros(1)
    work = work_of(dist.irecv(got, 1 - rank, tag=3))
    key = id(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(work), "is_completed", interrupting)
        with pytest.raises(KeyboardInterrupt):
            transport._forget()
    kept = key in transport._under_way
    dist.barrier()
    dist.send(torch.full((1,), 2.0 + rank), 1 - rank, tag=3)
    work.wait()
    return kept, float(got)


def test_an_interrupted_look_lets_go_of_nothing(ranks) -> None:
    assert ranks(2, on_shoal, interrupted_forgetting) == [(True, 3.0), (True, 2.0)]


def polled(place: Any, dies: bool) -> tuple[bool, str]:
    """Rank 0 asks again and again whether a barrier is over, which rank 1 does not come to."""

    def program(rank: int) -> tuple[bool, str]:
        dist.barrier()
        if rank == 1 and dies:
            os._exit(0)
        if rank == 1:
            place.store.wait(["told"])
            return True, ""
        work: Any = dist.barrier(async_op=True)
        wait_until(work.is_completed)
        place.store.set("told", "")
        try:
            work.wait(timedelta(seconds=0.5))
        except RuntimeError as error:
            return work.is_success(), str(error)
        return True, ""

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
            place.store.wait(["told"])
            return "", 0.0
        begin_s = time.monotonic()
        stuck = dist.all_reduce(torch.ones(1), async_op=True) if behind else None
        try:
            dist.barrier(timeout=timedelta(seconds=SHORT_S))
        except RuntimeError as error:
            return str(error), time.monotonic() - begin_s
        finally:
            place.store.set("told", "")
            del stuck
        return "came", 0.0

    with on_host(f"host-{place.rank * hosts // place.size}"):
        return on_shoal(place, program, timeout_s=NEVER_S)


@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("behind", [False, True])
def test_a_barrier_has_the_timeout_that_it_is_given(ranks, size: int, hosts: int, behind: bool) -> None:
    said, spent_s = ranks(size, impatient, hosts, behind)[0]
    assert "Timed out after" in said
    assert spent_s > 0.9 * SHORT_S


def dependent(place: Any) -> list[float]:
    """Calls in the same memory, none waited for before the next is made; rank 1 makes its own when rank 0 has long done
    so, and goes on with them late."""
    torch.set_num_threads(64)  # no core to spare: calls rest

    def program(rank: int) -> list[float]:
        group: Any = dist.group.WORLD
        whole = group.allocate(2 * LARGE, dtype=torch.float32, device=CPU).fill_(1.0 + 2 * rank)
        largest, scattered = options(c10d.AllreduceOptions, op="max"), torch.empty(LARGE)
        dist.barrier()
        time.sleep(0.2 * (rank == 0))
        works = [
            group.allreduce([whole]),
            group.allreduce([whole[LARGE:]], largest),
            group.reduce_scatter_single(scattered, whole),
            group.allreduce([whole[: 2 * LARGE]], largest),
            group.allreduce([whole[LARGE // 2 :]]),
        ]
        time.sleep(0.5 * (rank == 1))
        for work in works:
            work.wait()
        return [*whole.unique().tolist(), *scattered.unique().tolist()]

    try:
        return on_shoal(place, program)
    finally:
        torch.set_num_threads(1)


def test_calls_under_way_in_the_same_memory_come_one_after_the_other(ranks) -> None:
    """1 and 3: their sum, then the largest of what is alike by then, then sums of that."""
    assert ranks(2, dependent) == [[4.0, 8.0, 8.0]] * 2


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


HOSTS = [(2, 1), (3, 2)]


def outside_roots(place: Any, hosts: int) -> list[str]:
    """What a rank is told that names a root which the group does not have; the group goes on."""

    def program(rank: int) -> list[str]:
        said, ones = [], torch.ones(3)
        for root in (place.size, -1):
            for call in (
                lambda root=root: dist.broadcast(ones, src=root),
                lambda root=root: dist.reduce(ones, dst=root),
                lambda root=root: dist.gather(ones, None, dst=root),
                lambda root=root: dist.scatter(ones, None, src=root),
            ):
                try:
                    call()
                    said.append("no error")
                except ValueError as error:
                    said.append(str(error))
        dist.all_reduce(ones)
        return [*said, f"sum {float(ones[0]):g}"]

    with on_host(f"host-{place.rank % hosts}"):
        return on_shoal(place, program)


@pytest.mark.parametrize(("size", "hosts"), HOSTS)
def test_a_root_outside_the_group_is_refused(ranks, size: int, hosts: int) -> None:
    """On every rank, before anything is sent, on one host and on two."""
    for *said, total in ranks(size, outside_roots, hosts):
        assert total == f"sum {size}"
        assert len(said) == 8
        assert all("root" in sentence for sentence in said), said


def from_anybody(place: Any) -> str:
    """Rank 0 asks for a message of whoever sends, in a group on two hosts."""

    def program(rank: int) -> str:
        if rank:
            return ""
        try:
            dist.recv(torch.ones(3))
        except RuntimeError as error:
            return str(error)
        return "no error"

    with on_host("ab"[place.rank % 2]):
        return on_shoal(place, program)


def test_a_receive_without_a_source_on_two_hosts_is_refused(ranks) -> None:
    """It cannot wait for shared memory and Gloo at once: it says so, and what to do, instead of waiting for ever."""
    assert "name the source (src=RANK)" in ranks(3, from_anybody)[0]


def hurried(place: Any, hosts: int, source: int | None) -> str:
    """Rank 0 waits for the others, who do not come, after the timeout was set to `SHORT_S`: in a sum, or for a message
    of `source`."""

    def program(rank: int) -> str:
        dist.all_reduce(torch.ones(3))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if rank:
            place.store.set(f"summed {rank}", "")
            place.store.get("over")
            return ""
        place.store.wait([f"summed {other}" for other in range(1, place.size)])
        try:
            dist.all_reduce(torch.ones(3)) if source is None else dist.recv(torch.ones(3), source)
        except RuntimeError as error:
            return str(error)
        finally:
            place.store.set("over", "")
        return "no error"

    with on_host(f"host-{place.rank % hosts}"):
        return on_shoal(place, program, timeout_s=NEVER_S)


@pytest.mark.parametrize(("size", "hosts", "source"), [(2, 1, None), (3, 2, None), (2, 1, 1), (3, 2, 1), (3, 2, 2)])
def test_a_timeout_that_is_set_later_is_kept(ranks, size: int, hosts: int, source: int | None) -> None:
    """`_set_pg_timeout`, as with Gloo and NCCL: the next call ends after it, long before the one from the start; a
    message too, inside a host and between two."""
    sentence = ranks(size, hurried, hosts, source)[0]
    assert re.search("[Tt]imed out", sentence), sentence


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


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
        assert set(said) == {said[0]}, said
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
            place.store.get("sent")
            return said
        place.store.get("failed")
        try:
            return said_by(lambda: dist.send(torch.ones(3), 1))
        finally:
            place.store.set("sent", "")

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
            place.store.get("told")
            return ""
        if rank == 2:
            return said_by(lambda: group.monitored_barrier(timedelta(seconds=HANG_S)))
        try:
            group.monitored_barrier(timedelta(seconds=SHORT_S))
        except RuntimeError as error:
            return str(error)
        finally:
            place.store.set("told", "")
        return "passed"

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
