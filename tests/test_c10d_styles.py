"""Programs as people write them, on a group of Gloo's and on one of Shoal's: the same numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn as autograd
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shoal.c10d  # noqa: F401  (the backend's name)
from tests.test_c10d import agree, batch, both, network, two_steps

CPU = torch.device("cpu")


class OneOfTwo(nn.Module):
    """Rank 0 uses one branch, the others the other one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList([nn.Linear(12, 6), nn.Linear(12, 6)]).double()
        self.used = min(rank, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[self.used](x)


def unused_parameters(place: Any) -> list[Tensor]:
    return two_steps(DistributedDataParallel(OneOfTwo(place.rank), find_unused_parameters=True), place.rank)


def static_graph(place: Any) -> list[Tensor]:
    model = DistributedDataParallel(network(), static_graph=True, gradient_as_bucket_view=True)
    return [*two_steps(model, place.rank), *two_steps(model, place.rank + 5)]


def accumulated(place: Any) -> list[Tensor]:
    """A backward without a sum, before one with it."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    with model.no_sync():
        model(batch(place.rank + 3)).square().mean().backward()
    return two_steps(model, place.rank)


def sparse_gradients(place: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.tensor([place.rank, 2, 3 + place.rank])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def local_sgd(place: Any) -> list[Tensor]:
    model = DistributedDataParallel(network())
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    for number in range(5):
        model(batch(10 * number + place.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def first_fsdp(place: Any) -> list[Tensor]:
    model = FullyShardedDataParallel(network(), use_orig_params=True, device_id=CPU)
    losses = two_steps(model, place.rank)[:2]
    with FullyShardedDataParallel.summon_full_params(model):
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def mixed_precision(place: Any) -> list[Tensor]:
    """FSDP2 that gathers bfloat16 and reduces float32, with a clipped norm."""
    mesh, model = init_device_mesh("cpu", (place.size,)), network().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model(batch(place.rank).bfloat16()).float().square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in [norm, *gradients]]  # type: ignore[misc]


def differentiated(place: Any) -> list[Tensor]:
    """`torch.distributed.nn`, whose backward makes calls of its own."""
    world = dist.group.WORLD
    x = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    y = x * (place.rank + 1)
    found = [
        autograd.all_reduce(y.clone(), group=world),
        torch.cat(autograd.all_gather(y, group=world)),
        autograd.all_to_all_single(torch.empty_like(y), y, group=world),
        autograd.broadcast(y.clone(), 0, group=world),
        autograd.reduce_scatter(torch.empty_like(y[:2]), [y[:2].clone(), y[2:].clone()], group=world),
    ]
    torch.stack([each.pow(3).sum() for each in found]).sum().backward()
    assert x.grad is not None
    return [*(each.detach() for each in found), x.grad]


def objects_and_messages(place: Any) -> list[Tensor]:
    """Objects, groups inside of groups, and messages that cross."""
    rank, other = place.rank, 1 - place.rank
    gathered: list[Any] = [None] * place.size
    dist.all_gather_object(gathered, {"rank": rank, "rows": torch.ones(2) * rank})
    given = [rank, "x"] if rank == 0 else [None, None]
    dist.broadcast_object_list(given, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [10, 20] if rank == 0 else None, 0)
    x, came = torch.ones(3) * (rank + 1), torch.zeros(5)
    dist.all_reduce(x, group=dist.new_subgroups(1)[0])
    dist.all_reduce(x, group=dist.new_group([0, 1], use_local_synchronization=True))
    crossing = [
        dist.P2POp(dist.isend, torch.arange(5.0) + rank, other),
        dist.P2POp(dist.irecv, came, other),
    ]
    for work in dist.batch_isend_irecv(crossing):
        work.wait()
    return [gathered[1]["rows"], torch.tensor([given[0], mine[0]]), x, came]


def redistributed(place: Any) -> list[Tensor]:
    """DTensors of uneven shards, over a mesh whose dims have names."""
    mesh = init_device_mesh("cpu", (1, place.size), mesh_dim_names=("outer", "inner"))["inner"]
    x = torch.arange(35.0, dtype=torch.float64).view(7, 5)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = columns @ distribute_tensor(x.mT.contiguous(), mesh, [Replicate()])
    partial_sum = DTensor.from_local(x * (place.rank + 1), mesh, [Partial()]).redistribute(mesh, [Shard(0)])
    return [each.full_tensor() for each in (rows, columns, product, partial_sum, columns.sum(), rows.max())]


def interleaved(place: Any) -> list[Tensor]:
    """Two stages on each rank."""
    stages = []
    for number in (place.rank, place.rank + place.size):
        torch.manual_seed(number)
        part = nn.Sequential(nn.Linear(12, 12), nn.Tanh()).double()
        stages.append(PipelineStage(part, number, 2 * place.size, CPU))
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=lambda out, want: (out - want).square().sum())
    given, losses = batch(5), list[Tensor]()
    _ = schedule.step(given) if place.rank == 0 else schedule.step(target=given, losses=losses)
    gradients = [p.grad for stage in stages for p in stage.submod.parameters() if p.grad is not None]
    return [*gradients, *(loss.detach() for loss in losses)]


def saved_beside(place: Any, folder: Path) -> list[Tensor]:
    """Model and optimizer under FSDP2, saved in the background, loaded into others, and a step further."""

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (place.size,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch(place.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = built()
    step(model, optimizer)
    saved = folder / type(dist.group.WORLD).__name__
    saving: Any = dcp.async_save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=saved)
    saving.result()
    model, optimizer = built()
    state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=saved)
    set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    step(model, optimizer)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[operator]


PROGRAMS: list[Callable[[Any], list[Tensor]]] = [
    *(unused_parameters, static_graph, accumulated, sparse_gradients, local_sgd, first_fsdp, mixed_precision),
    *(differentiated, objects_and_messages, redistributed, interleaved),
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_of_this_style_computes_what_it_computes_on_gloo(ranks, program: Callable) -> None:
    agree(ranks(2, both, program))


@pytest.mark.slow
def test_a_checkpoint_that_is_saved_beside_the_training_comes_back(ranks, tmp_path: Path) -> None:
    agree(ranks(2, both, partial(saved_beside, folder=tmp_path)))


def accelerated(place: Any) -> list[Tensor]:
    """A loop of Accelerate's, which finds the default group and asks nothing of its backend."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import gather_object

    place_here = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.rank, "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place_here.items():
            patch.setitem(os.environ, name, str(value))
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, given = network(), torch.utils.data.TensorDataset(batch(0).repeat(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader: Any = torch.utils.data.DataLoader(given, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        loss = torch.zeros(())
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        found = [accelerator.gather_for_metrics(loss.detach()[None]), torch.tensor(gather_object([place.rank]))]
        found.append(accelerator.pad_across_processes(torch.ones(2 + place.rank)))
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    return [*found, *(parameter.detach() for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.mark.slow
def test_accelerate_trains_on_it_as_on_gloo(ranks) -> None:
    pytest.importorskip("accelerate", reason="its loop")
    agree(ranks(2, both, accelerated))
