"""One program on a group of Gloo's and on one of Shoal's: what Gloo gives, Shoal's backend gives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import shoal.c10d  # noqa: F401  (the backend's name)
from tests.comm.hosts import on_host
from tests.waiting import HANG_S

HOSTS = [(2, 1), (3, 2)]
"""Ranks, and the hosts that they are on."""
ROUNDED = 2e-3
"""Two roundings to float16 of gradients below one, times the learning rate: sums of three ranks are added
in another order than Gloo's."""
LR = 0.1
KEPT: list[Any] = []
"""Groups that live as long as the process. A hook's callback holds its group, and one of Gloo's that its own thread
lets go of last ends the process ("Resource deadlock avoided", torch 2.13)."""


def on_both(place: Any, hosts: int, program: Callable[..., Any], *args: Any) -> list[Any]:
    """What `program(place, ...)` gives where PyTorch's default group is Gloo's, and where it is Shoal's."""
    found = []
    with on_host(f"host-{place.rank % hosts}"):
        for backend in ("gloo", "shoal"):
            store = dist.PrefixStore(backend, place.store)
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=HANG_S)
            )
            KEPT.append(dist.group.WORLD)
            try:
                found.append(program(place, *args))
            finally:
                dist.destroy_process_group()
    return found


def power_sgd(model: DistributedDataParallel) -> None:
    """It compresses from the third step on."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: dict[str, Callable[[DistributedDataParallel], object]] = {
    "built-in float16": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    "built-in all-reduce": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "float16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "PowerSGD": power_sgd,
}


def trained(place: Any, hook: str) -> list[float]:
    """The weights after some steps of DDP with a communication hook."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)))
    HOOKS[hook](model)
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(place.rank))
    for _ in range(5):
        model(inputs).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= LR * parameter.grad
                parameter.grad = None
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize(("size", "hosts"), HOSTS)
@pytest.mark.parametrize("hook", list(HOOKS))
def test_communication_hooks_of_ddp_train_the_same_model(ranks, hook: str, size: int, hosts: int) -> None:
    """PyTorch's own in C++ and in Python: the same weights on all ranks, and Gloo's: two ranks to the bit."""
    found = ranks(size, on_both, hosts, trained, hook)
    gloo, ours = (torch.tensor(weights) for weights in found[0])
    assert all(weights == found[0] for weights in found)
    assert float((gloo - ours).abs().max()) <= (0.0 if size == 2 else ROUNDED)


def uneven_blocks(rank: int, ranks: int, dtype: torch.dtype) -> list[Tensor]:
    """What `rank` brings for each rank: many elements, three, none."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [(70_001, 3, 0)[other % 3] for other in range(ranks)]
    return [torch.randint(-9, 10, (size,), generator=generator).to(dtype) for size in sizes]


def uneven(place: Any) -> list[str]:
    """What is wrong with list reduce-scatters of blocks that differ in size: waited for at once, later, by a future;
    into memory that is contiguous or not."""
    wrong, ours = [], dist.get_backend() == "shoal"
    waits = (
        ("at once", "later", "by a future") if ours else ("at once",)
    )  # Gloo's have no futures, and leave strides alone
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        all_blocks = [uneven_blocks(rank, place.size, dtype) for rank in range(place.size)]
        stacked = torch.stack([blocks[place.rank] for blocks in all_blocks])
        for op, want in ((dist.ReduceOp.SUM, stacked.sum(0)), (dist.ReduceOp.MAX, stacked.amax(0))):
            for wait in waits:
                wide = torch.zeros(len(want), 2, dtype=dtype)
                output = wide[:, 0] if wait == "later" else wide[:, 0].clone()
                work: Any = dist.reduce_scatter(output, all_blocks[place.rank], op=op, async_op=wait != "at once")
                if wait == "later":
                    work.wait()
                if wait == "by a future":
                    work.get_future().wait()
                if not torch.equal(output, want.to(dtype)) or wide[:, 1].any():
                    wrong.append(f"{op} of {dtype}, waited for {wait}")
    return wrong


@pytest.mark.parametrize(("size", "hosts"), HOSTS)
def test_a_reduce_scatter_takes_blocks_of_different_sizes(ranks, size: int, hosts: int) -> None:
    """Of lists, as on Gloo."""
    assert ranks(size, on_both, hosts, uneven) == [[[], []]] * size


def numbered(place: Any) -> list[int]:
    """By how much the group's sequence number has grown after each of several calls."""
    group: Any = dist.group.WORLD
    group._set_sequence_number_for_group()
    first, whole = group._get_sequence_number_for_group(), torch.zeros(place.size)
    own, parts = torch.ones(1), [torch.zeros(1) for _ in range(place.size)]
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(own),
        lambda: dist.all_reduce(own, async_op=True).wait(),  # type: ignore[union-attr]
        lambda: dist.broadcast(own, 0),
        lambda: dist.all_gather(parts, own),
        lambda: dist.all_gather_into_tensor(whole, own),
        lambda: dist.reduce_scatter_tensor(own, whole),
        lambda: dist.all_to_all_single(whole, whole.clone()),
        lambda: dist.barrier(),
    ]
    grown = []
    for call in calls:
        call()
        grown.append(group._get_sequence_number_for_group() - first)
    return grown


@pytest.mark.parametrize(("size", "hosts"), HOSTS)
def test_collectives_are_numbered(ranks, size: int, hosts: int) -> None:
    """Alike on all ranks, one by one, as Gloo numbers them."""
    for gloo, ours in ranks(size, on_both, hosts, numbered):
        assert ours == gloo == list(range(1, 9))
