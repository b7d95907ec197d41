"""Plain PyTorch programs, as their authors write them with DDP, FSDP2 or tensor parallelism.

No part of Shoal's engine is in them: only the group that they are handed differs from backend to backend.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal.models.build import build
from shoal.models.gpt import GPT
from shoal.models.initialise import initialise
from shoal.recipes.benchmarks.ddp_script import ByteSamples, decay_groups
from shoal.recipes.benchmarks.gpt_job import MODEL, SEQUENCE

TENSOR = 2
"""Ranks that share a model under tensor parallelism; with more ranks, pairs that know nothing of each other."""

Group = dist.ProcessGroup
Program = Callable[[], float]
"""One update; its loss."""


def ddp(group: Group, corpus: Path, *, tokens: int) -> Program:
    """Replicas whose gradients DDP sums in buckets."""
    return _program(_replicated(group), _samples(corpus, tokens, seed=group.rank()))


def ddp_on_instant_network(group: Group, corpus: Path, *, tokens: int) -> Program:
    """The same with buckets that are back at once, as they were: DDP's own copies and hooks, and no communication."""
    model = _replicated(group)
    model.register_comm_hook(None, lambda _, bucket: _there(bucket.buffer()))
    return _program(model, _samples(corpus, tokens, seed=group.rank()))


def fsdp2(group: Group, corpus: Path, *, tokens: int) -> Program:
    """Parameters sharded over all ranks, a unit for each block."""
    mesh, model = _mesh(group), _gpt()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _program(model, _samples(corpus, tokens, seed=group.rank()))


def tensor(group: Group, corpus: Path, *, tokens: int) -> Program:
    """Attention and feed-forward split over two ranks, which see the same tokens."""
    mesh, model = _mesh(group), _gpt()
    columns = ("attention.query", "attention.key", "attention.value", "feed_forward.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.output", "feed_forward.down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan, src_data_rank=None)
    return _program(model, _samples(corpus, tokens, seed=0))


def alone(group: Group, corpus: Path, *, tokens: int) -> Program:
    """The model on the rank's own tokens, and nothing between the ranks."""
    return _program(_gpt(), _samples(corpus, tokens, seed=group.rank()))


PROGRAMS = {"ddp": ddp, "fsdp2": fsdp2, "tensor": tensor}

ON_INSTANT_NETWORK = PROGRAMS | {"ddp": ddp_on_instant_network}
"""For a group of PyTorch's fake backend, whose calls are over when they are made; every copy that a program makes for
itself is made. An all-reduce leaves what was there, an all-gather writes the rank's own shard into every rank's part,
and a reduce-scatter takes the rank's part out: outputs are written as if a network had brought them. DDP asks for
futures with buckets in them, which the fake backend's have not; hence the hook."""


def _replicated(group: Group) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(_gpt(), process_group=group, gradient_as_bucket_view=True)


def _there(buffer: Tensor) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(buffer)
    return future


def _gpt() -> GPT:
    model = build(MODEL)
    initialise(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(model, GPT)
    return model


def _mesh(group: Group) -> DeviceMesh:
    """Named after its group: DTensor's caches take meshes of the same ranks and names for one, and would give all
    programs of a process the first one's group."""
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
