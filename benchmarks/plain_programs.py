"""Plain PyTorch programs, as their authors write them with DDP, FSDP2 or tensor parallelism.

They use no part of Shoal's engine: only the group that they get differs from backend to backend. The all-reduces of a
program's step can be recorded, and repeated without the program: what tensor parallelism sends may be too little to be
seen in a step's time, and can still be measured alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.bench.ddp_script import ByteSamples, decay_groups, new_gpt
from shoal.bench.training_job import SEQUENCE

TENSOR = 2
"""Ranks that share a model under tensor parallelism; more ranks make independent pairs."""

Group = dist.ProcessGroup
Program = Callable[[], float]
"""Makes one update and returns its loss."""
_FUNCTIONAL = torch.ops._c10d_functional
_ALL_REDUCES = (_FUNCTIONAL.all_reduce, _FUNCTIONAL.all_reduce_)


def ddp(group: Group, corpus: Path, *, tokens: int) -> Program:
    """Replicas whose gradients DDP sums in buckets."""
    return _program(_replicated(group), _samples(corpus, tokens, seed=group.rank()))


def ddp_on_instant_network(group: Group, corpus: Path, *, tokens: int) -> Program:
    """The same with buckets that come back at once, unchanged: DDP's own copies and hooks, and no communication."""
    model = _replicated(group)
    model.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
    return _program(model, _samples(corpus, tokens, seed=group.rank()))


def fsdp2(group: Group, corpus: Path, *, tokens: int) -> Program:
    """Parameters sharded over all ranks, a unit for each block."""
    mesh, model = _mesh(group), new_gpt()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _program(model, _samples(corpus, tokens, seed=group.rank()))


def tensor(group: Group, corpus: Path, *, tokens: int) -> Program:
    """Attention and feed-forward split over two ranks, which see the same tokens."""
    mesh, model = _mesh(group), new_gpt()
    columns = ("attention.query", "attention.key", "attention.value", "feed_forward.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.output", "feed_forward.down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan, src_data_rank=None)
    return _program(model, _samples(corpus, tokens, seed=0))


def alone(group: Group, corpus: Path, *, tokens: int) -> Program:
    """The model on the rank's own tokens, without communication."""
    return _program(new_gpt(), _samples(corpus, tokens, seed=group.rank()))


PROGRAMS = {"ddp": ddp, "fsdp2": fsdp2, "tensor": tensor}

ON_INSTANT_NETWORK = PROGRAMS | {"ddp": ddp_on_instant_network}
"""For a group of PyTorch's fake backend, whose calls complete at once. Every copy that a program itself makes is made.
An all-reduce leaves its tensor as it was, an all-gather writes the rank's own shard into every rank's part, and a
reduce-scatter copies the rank's part: outputs are written as if a network had brought them. DDP needs futures that hold
buckets, which the fake backend's do not; hence the hook."""


class AllReduces(TorchDispatchMode):
    """Records the number of elements of every functional all-reduce while it is entered, in `numels`."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it is dispatched again, on local tensors
        if func._overloadpacket in _ALL_REDUCES:
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def all_reduces(step: Callable[[], Any]) -> list[int]:
    """The elements of each functional all-reduce that `step` makes, in order."""
    with AllReduces() as found:
        step()
    return found.numels


def repeated(numels: Sequence[int], group: dist.ProcessGroup) -> Callable[[], None]:
    """A function that makes all-reduces of these sizes over float32 zeros, one after the other."""
    tensors = [torch.zeros(numel) for numel in numels]

    def calls() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)

    return calls


def _replicated(group: Group) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(new_gpt(), process_group=group, gradient_as_bucket_view=True)


def _done(buffer: Tensor) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(buffer)
    return future


def _mesh(group: Group) -> DeviceMesh:
    """Named after its group. DTensor's caches treat meshes with the same ranks and names as one, and would give all
    programs of a process the group of the first."""
    ranks = torch.tensor(dist.get_process_group_ranks(group))
    return DeviceMesh.from_group(group, "cpu", mesh=ranks, mesh_dim_names=(group.group_name,))


def _samples(corpus: Path, tokens: int, *, seed: int) -> ByteSamples:
    return ByteSamples(corpus, samples=tokens // SEQUENCE, sequence=SEQUENCE, rank=seed)


def _program(model: nn.Module, batches: ByteSamples) -> Program:
    optimizer = torch.optim.AdamW(decay_groups(model), lr=3e-4, betas=(0.9, 0.95))

    def step() -> float:
        batch = batches.next()
        loss = _loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
