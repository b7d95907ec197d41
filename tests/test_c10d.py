"""The backend "shoal" of PyTorch's distributed package: what stands on process groups gives what it gives on Gloo."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, all_to_all_single
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shoal.c10d  # noqa: F401  (the backend's name)
from shoal.comm.shm import transport
from shoal.comm.shm.group import CoreGroup
from shoal.comm.shm.transport import PATIENCE_S
from tests.held import held, none_more
from tests.waiting import HANG_S, wait_until

RELATIVE = 1e-12  # float64; with more than two ranks Gloo adds in another order


def with_backend(place, backend: str, program: Callable[..., Any], *args: Any) -> Any:
    """What `program(place)` returns between making and destroying the default group."""
    store = dist.PrefixStore(backend, place.store)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=HANG_S)
    )  # fmt: skip
    try:
        assert isinstance(dist.group.WORLD, CoreGroup) == (backend == "shoal")
        return program(place, *args)
    finally:
        dist.destroy_process_group()


def both(place, program: Callable[..., Any]) -> list[Any]:
    return [with_backend(place, backend, program) for backend in ("gloo", "shoal")]


def called(place, headers: bool, program: Callable[..., Any], *args: Any) -> Any:
    """`program(place, *args)`, its groups as of a core that was built with the interpreter's headers, or without."""
    with pytest.MonkeyPatch.context() as patch:
        if not headers:
            patch.setattr(transport, "load_call", lambda: None)
        return program(place, *args)


def agree(results: list[Any]) -> None:
    """Gloo's tensors and Shoal's, of every rank."""
    for gloo, ours in results:
        assert len(gloo) == len(ours) > 0
        for want, got in zip(gloo, ours, strict=True):
            torch.testing.assert_close(got, want, rtol=RELATIVE, atol=RELATIVE)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 6)).double()


def batch(rank: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def two_steps(model: nn.Module, rank: int) -> list[Tensor]:
    """Losses and parameters after two steps of SGD."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = model(batch(rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return losses + [p.detach().clone() for p in whole]


def data_parallel(place) -> list[Tensor]:
    return two_steps(DistributedDataParallel(network(), bucket_cap_mb=0.002), place.rank)


def fully_sharded(place) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (place.size,))
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return two_steps(model, place.rank)


def hybrid_sharded(place) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, place.size // 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh)
    return two_steps(model, place.rank)


def tensor_parallel(place) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (place.size,))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return two_steps(model, 0)


def pipelined(place) -> list[Tensor]:
    torch.manual_seed(place.rank)
    part = nn.Sequential(nn.Linear(12, 12), nn.Tanh()).double()
    stage = PipelineStage(part, place.rank, place.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=lambda out, want: (out - want).square().sum())
    given = torch.randn(16, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    losses: list[Tensor] = []
    if place.rank == 0:
        schedule.step(given)
    elif place.rank == place.size - 1:
        schedule.step(target=given * 2, losses=losses)
    else:
        schedule.step()
    return [p.grad for p in part.parameters() if p.grad is not None] + [loss.detach() for loss in losses]


@pytest.mark.parametrize("program", [data_parallel, fully_sharded, tensor_parallel, pipelined])
def test_two_ranks_compute_what_they_compute_on_gloo(ranks, program) -> None:
    """Losses, weights and gradients after real steps of DDP, FSDP2, tensor parallelism and 1F1B."""
    agree(ranks(2, both, program))


@pytest.mark.parametrize("program", [data_parallel, hybrid_sharded])
def test_four_ranks_compute_what_they_compute_on_gloo(ranks, program) -> None:
    """Hybrid sharding has groups of two that overlap; DDP sums over four."""
    agree(ranks(4, both, program))


def functional(place) -> list[Tensor]:
    own, group = batch(place.rank)[:6], dist.group.WORLD
    assert group is not None
    sizes = [2, 4] if place.rank == 0 else [3, 3]
    given = [2, 3] if place.rank == 0 else [4, 3]
    return [
        all_reduce(own, "sum", group) + 0,
        all_gather_tensor(own, 0, group) + 0,
        all_to_all_single(own, given, sizes, group) + 0,
    ]


def test_functional_collectives_are_those_of_gloo(ranks) -> None:
    """What DTensor calls, from C++, uneven all-to-all among it."""
    agree(ranks(2, both, functional))


def objects(place) -> tuple[Any, ...]:
    """Pickled objects, and groups made by all and used by some."""
    everybody: list[Any] = [None] * place.size
    dist.all_gather_object(everybody, {"rank": place.rank})
    told = [place.rank]
    dist.broadcast_object_list(told, src=1)
    some = dist.new_group([1, 2])
    total = torch.ones(3)
    if place.rank in (1, 2):
        dist.all_reduce(total, group=some)
    dist.barrier()
    received = torch.zeros(2)
    if place.rank == 0:
        source = dist.recv(received, tag=4)
    else:
        source = -1
        if place.rank == 2:
            dist.send(torch.full((2,), 7.0), dst=0, tag=4)
    return everybody, told, total.tolist(), received.tolist(), source


def test_objects_subgroups_and_any_source(ranks) -> None:
    """`all_gather_object`, `new_group` of some ranks, a receive from whoever sends."""
    outcomes = ranks(3, lambda_free_objects)
    everybody = [{"rank": r} for r in range(3)]
    assert outcomes[0] == (everybody, [1], [1.0] * 3, [7.0, 7.0], 2)
    assert outcomes[1] == (everybody, [1], [2.0] * 3, [0.0, 0.0], -1)


def lambda_free_objects(place) -> Any:
    return with_backend(place, "shoal", objects)


def waited_for_at_once(place) -> list[Tensor]:
    """What synchronous calls of every kind give, several tensors in one call among them; rank 1 is late once."""
    rank, size = place.rank, place.size
    torch.manual_seed(rank)
    own, strided = torch.randn(size * 6).double(), torch.randn(4, 3).double().t()
    found = [strided]
    dist.all_reduce(strided)
    if rank == 1:
        time.sleep(2 * PATIENCE_S)
    pair = [own.clone(), torch.randn(3, 2).double().t()]
    with dist._coalescing_manager():  # the way of `all_reduce_coalesced`, in newer releases
        for tensor in pair:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    found += pair
    rows = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(rows, own)
    dist.broadcast(rows[1], src=1)
    parts, part = list(own.clone().chunk(size)), torch.empty(6).double()
    dist.scatter(part, parts if rank == 0 else None, src=0)
    dist.gather(part, parts if rank == 0 else None, dst=0)
    swapped, reduced, total = torch.empty_like(own), torch.empty(6).double(), own.clone()
    dist.all_to_all_single(swapped, own)
    dist.reduce_scatter(reduced, list(own.chunk(size)))
    dist.reduce(total, dst=1)
    dist.barrier()
    return [*found, *rows, *parts, part, swapped, reduced, *([total] if rank == 1 else [])]


@pytest.mark.parametrize("headers", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_calls_waited_for_at_once_are_those_of_gloo(ranks, size: int, headers: bool) -> None:
    """Strided tensors, several in one call, a rank that is late."""
    agree(ranks(size, called, headers, both, waited_for_at_once))


def prompt_calls(place) -> tuple[bool, str]:
    """Whether a call that is waited for at once gives no work; what is said where ranks differ."""

    def program(_: object) -> tuple[bool, str]:
        options = AllreduceOptions()
        options.asyncOp = False
        works = [dist.group.WORLD.allreduce([torch.ones(5)], options) for _ in range(10)]  # type: ignore[union-attr]
        for work in works:
            assert work is None or work.wait()  # one that took long, as the first may have
        with pytest.raises(RuntimeError) as refused:
            dist.all_reduce(torch.ones(8 + place.rank))
        return works[-1] is None, str(refused.value)

    return with_backend(place, "shoal", program)


@pytest.mark.parametrize("headers", [True, False])
def test_a_call_waited_for_at_once_gives_no_work(ranks, headers: bool) -> None:
    """As c10d allows its backends; where ranks differ it does, and that one raises."""
    for rank, (ended, refused) in enumerate(ranks(2, called, headers, prompt_calls)):
        assert ended
        assert f"rank {rank} called all_reduce of {32 + 4 * rank} bytes" in refused


class Stop(Exception):
    """What the signal of a test raises."""


def times_rested(pid: int) -> int:
    """How often a process has given up its core to wait for something."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def interrupted(place, in_time: bool) -> tuple[list[float], list[float]]:
    """A strided sum of a call that a signal has ended on rank 0, and one of the next calls. Rank 1 sends it, and comes
    right behind it (`in_time`: most often before rank 0 looks for signals) or when its exception is out.
    """

    def stop(*_: object) -> None:
        raise Stop

    def program(_: object) -> tuple[list[float], list[float]]:
        late, filler = torch.full((1 << 16, 2), 1.0 + place.rank).t(), []  # in two shots: both need the other twice
        if place.rank == 0:
            before = signal.signal(signal.SIGALRM, stop)
            place.store.set("ready", str(os.getpid()))
            with pytest.raises(Stop):
                dist.all_reduce(late)
            signal.signal(signal.SIGALRM, before)
            gc.collect()
            filler = [torch.full((1 << 17,), 9.0) for _ in range(64)]  # would take the place of memory that was freed
            place.store.set("interrupted", "")
            place.store.wait(["summed"])  # no call meanwhile: the group goes on by itself
        else:
            waiter = int(place.store.get("ready"))
            rests = times_rested(waiter)
            wait_until(lambda: times_rested(waiter) > rests + 3)  # it is in its call, and has just looked for signals
            os.kill(waiter, signal.SIGALRM)
            if not in_time:
                place.store.wait(["interrupted"])
            dist.all_reduce(late)
            place.store.set("summed", "")
        total = torch.ones(4)
        dist.all_reduce(total)
        dist.all_reduce(total)  # by now what the first has left is put in its place
        assert all(bool((each == 9.0).all()) for each in filler)
        return late.unique().tolist(), total.tolist()

    return with_backend(place, "shoal", program)


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("headers", [True, False])
def test_a_signal_in_a_call_leaves_it_to_be_carried_out(ranks, headers: bool, in_time: bool) -> None:
    """All get what all have brought, strided tensors too; their memory lives until then; later calls are right."""
    assert ranks(2, called, headers, interrupted, in_time) == [([3.0], [4.0] * 4)] * 2


def leaves_nothing(place, groups: int) -> None:
    """Many groups, made, used and destroyed, leave nothing."""

    def program(_: object) -> None:
        for _ in range(3):
            dist.destroy_process_group(dist.new_group())
        before = held()
        for _ in range(groups):
            group = dist.new_group()
            dist.all_reduce(torch.ones(4), group=group)
            dist.destroy_process_group(group)
            del group
        none_more(before)

    with_backend(place, "shoal", program)


@pytest.mark.slow
def test_groups_that_are_destroyed_leave_nothing(ranks) -> None:
    """Sixty groups, made, used and destroyed: no descriptor, segment or thread more than before."""
    ranks(2, leaves_nothing, 60)


def threads() -> set[int]:
    return {int(thread) for thread in os.listdir("/proc/self/task")}


def policies_of_new_threads(place) -> list[int]:
    """On rank 0: of those that carry out a call which nobody waits for but its future. Rank 1 comes after that."""

    def program(_: object) -> list[int]:
        group, total = dist.new_group(), torch.ones(1 << 19)
        there = threads()
        if place.rank == 1:
            place.store.wait(["asked"])
            dist.all_reduce(total, group=group)
            return []
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        future = work.get_future()
        place.store.set("asked", "")
        future.wait()
        return [os.sched_getscheduler(thread) for thread in threads() - there]

    return with_backend(place, "shoal", program)


def test_threads_of_the_backend_do_not_interrupt_those_that_compute(ranks) -> None:
    """They are batch threads: the core's, and the one that completes futures."""
    assert ranks(2, policies_of_new_threads)[0] == [os.SCHED_BATCH] * 2
