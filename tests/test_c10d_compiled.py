"""The backend "shoal" under `torch.compile`, DDP's `join` and PyTorch's distributed checkpoints: as on Gloo.

Compiled by "aot_eager", which traces forward and backward as inductor does and generates no C++; inductor itself under
`-m stress`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shoal.c10d  # noqa: F401  (the backend's name)
from tests.test_c10d import agree, batch, both, network, two_steps

Compiler = str


def compiled(function: Callable, compiler: Compiler, **options: bool) -> Callable:
    """`function` compiled anew: the worker may have compiled it before, for a group that is gone."""
    torch._dynamo.reset()
    return torch.compile(function, backend=compiler, **options)


def eager_collectives(place, compiler: Compiler) -> list[Tensor]:
    """`dist.all_reduce` and others, as a user's compiled function calls them."""

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        dist.all_reduce(y)
        parts = torch.empty(place.size * y.shape[0], y.shape[1], dtype=y.dtype)
        dist.all_gather_into_tensor(parts, y + 1)
        share = torch.empty_like(y)
        dist.reduce_scatter_tensor(share, parts)
        return y.sin(), parts, share

    step = compiled(step, compiler)
    return [*step(batch(place.rank)), *step(batch(place.rank + 7))]


def functional_collectives(place, compiler: Compiler) -> list[Tensor]:
    """The functional ones, in one graph."""
    group = dist.group.WORLD
    assert group is not None

    def step(x: Tensor) -> Tensor:
        summed = all_reduce(x * 2, "sum", group)
        whole = all_gather_tensor(summed.sin(), 0, group)
        return reduce_scatter_tensor(whole, "sum", 0, group) + 1

    return [compiled(step, compiler, fullgraph=True)(batch(place.rank))]


def fully_sharded(place, compiler: Compiler) -> list[Tensor]:
    """FSDP2, every layer compiled."""
    torch._dynamo.reset()
    mesh, model = init_device_mesh("cpu", (place.size,)), network()
    for layer in (model[0], model[2]):
        layer.compile(backend=compiler)
        fully_shard(layer, mesh=mesh)
    return two_steps(fully_shard(model, mesh=mesh), place.rank)


def group_inside(place, compiler: Compiler) -> list[Tensor]:
    """A function that makes its group itself: Dynamo sees the frames in which it comes to be."""

    def step(x: Tensor) -> Tensor:
        group = dist.new_group(list(range(place.size)))
        y = x * 2
        dist.all_reduce(y, group=group)
        return y.sin()

    return [compiled(step, compiler)(batch(place.rank))]


def buffered(place, compiler: Compiler) -> list[Tensor]:
    """A whole DDP model, which broadcasts its buffers in each forward: from C++, between two graphs."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Linear(40, 6)).double()
    model = DistributedDataParallel(model)
    return [*two_steps(compiled(model, compiler), place.rank), *model.buffers()]


PROGRAMS = [eager_collectives, functional_collectives, fully_sharded, group_inside, buffered]


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_programs_compute_what_they_compute_on_gloo(ranks, program) -> None:
    """Traced forward and backward, with collectives in the graph or between graphs."""
    agree(ranks(2, both, partial(program, compiler="aot_eager")))


@pytest.mark.stress
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_inductor_compute_what_they_compute_on_gloo(ranks, program) -> None:
    """Generated C++, the collectives reordered."""
    agree(ranks(2, both, partial(program, compiler="inductor"), timeout_s=240.0))


def uneven(place, by_all: bool) -> list[Tensor]:
    """Rank r takes r + 2 steps: who has no more data shadows the others' collectives. Gradients are divided by the
    number of all ranks (`by_all`), or of those that remain."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=by_all):
        for number in range(place.rank + 2):
            model(batch(10 * number + place.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("by_all", [True, False])
def test_uneven_inputs_train_as_on_gloo(ranks, by_all: bool) -> None:
    """DDP's own `join`, which divides by all ranks or by those that still have data. For that its C++ asks a work for
    its result that no Python refers to any longer."""
    agree(ranks(3, both, partial(uneven, by_all=by_all)))


def joined_zero(place) -> list[Tensor]:
    """DDP and ZeroRedundancyOptimizer under one `Join`."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with Join([model, optimizer]):
        for number in range(place.rank + 2):
            model(batch(10 * number + place.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_join_of_several_is_that_of_gloo(ranks) -> None:
    """PyTorch's generic context, whose hooks send on both groups' behalf."""
    agree(ranks(3, both, joined_zero))


def checkpointed(place, folder: Path) -> list[Tensor]:
    """FSDP2's weights after two steps, saved by DCP, loaded into a model that is sharded and otherwise filled."""
    mesh, model = init_device_mesh("cpu", (place.size,)), network()
    fully_shard(model, mesh=mesh)
    two_steps(model, place.rank)
    saved = folder / type(dist.group.WORLD).__name__
    dcp.save(get_model_state_dict(model), checkpoint_id=saved)
    torch.manual_seed(99)
    other = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 6)).double()
    fully_shard(other, mesh=mesh)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=saved)
    found = [value.full_tensor() if isinstance(value, DTensor) else value for value in state.values()]
    wanted = [value.full_tensor() for value in model.parameters() if isinstance(value, DTensor)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return found


def test_distributed_checkpoints_come_back(ranks, tmp_path: Path) -> None:
    """To the bit, and as on Gloo."""
    agree(ranks(2, both, partial(checkpointed, folder=tmp_path)))
