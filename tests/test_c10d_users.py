"""What programs do beside training: futures, messages in any order, mistakes, calls in the same memory."""

from __future__ import annotations

import gc
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
from tests.comm.hosts import on_host
from tests.comm.shm.test_group import options
from tests.comm.shm.test_window import CPU, LARGE
from tests.waiting import HANG_S

MEGABYTE = 1 << 20
HOSTS = [(2, 1), (3, 2)]
"""Ranks, and the hosts that they play to be on."""


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


def said_by(call: Callable[[], object]) -> str:
    """The sentence of the error that the call raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


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
        said = said_by(lambda: MISTAKES[mistake](rank))
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
                said.append(said_by(call))
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
        return "" if rank else said_by(lambda: dist.recv(torch.ones(3)))

    with on_host("ab"[place.rank % 2]):
        return on_shoal(place, program)


def test_a_receive_without_a_source_on_two_hosts_is_refused(ranks) -> None:
    """It cannot wait for shared memory and Gloo at once: it says so, and what to do, instead of waiting for ever."""
    assert "name the source (src=RANK)" in ranks(3, from_anybody)[0]
