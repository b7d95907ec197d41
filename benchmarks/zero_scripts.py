"""The loop of the DDP script without DDP: over `fully_shard` as a peer, and over Shoal's gradients.

Neither uses Shoal's engine, so that their steps differ only in how gradients and parameters travel.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.bench.ddp_script import ByteSamples, decay_groups
from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.gradients.build import build_gradients
from shoal.gradients.config import GradientsConfig
from shoal.models.gpt import GPT
from shoal.optim.build import build_optimizer
from shoal.optim.config import AdamW
from shoal.state import Trained
from shoal.topology.holding import Ranks, held
from shoal.topology.layout import INSIDE_REPLICA


class ShardedScript:
    """The peer of ZeRO-3, as a careful person writes it by hand: each block is a unit of `fully_shard`."""

    def __init__(self, model: GPT, corpus: Path, *, samples: int, sequence: int, rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(decay_groups(model), lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.batches = ByteSamples(corpus, samples=samples, sequence=sequence, rank=rank)

    def step(self) -> float:
        """Makes one update and returns its loss."""
        batch = self.batches.next()
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


class ZeroScript:
    """Shoal's gradients and optimizer under a stage of ZeRO."""

    def __init__(
        self,
        model: GPT,
        corpus: Path,
        mesh: Mesh,
        groups: Callable[[Ranks], Collective] | None = None,
        /,
        *,
        zero: int,
        samples: int,
        sequence: int,
    ) -> None:
        """`groups`: the group of each set of ranks, where it is not that of `mesh`."""
        trained = [
            Trained(held(mesh.layout, mesh.rank, name, tuple(p.shape)), p) for name, p in model.named_parameters()
        ]
        self.model, self.world_size = model, mesh.layout.world_size
        self.gradients = build_gradients(
            GradientsConfig(),
            trained,
            zero=zero,
            groups=groups or mesh.ranks,
            replica=mesh.axis(*INSIDE_REPLICA),
            model=model,
            blocks=list(model.blocks),
        )
        owned = [(o.name, o.parameter, len(o.holding.global_shape) > 1) for o in self.gradients.owned]
        self.optimizer = build_optimizer(AdamW(), owned, lr=3e-4)
        self.batches = ByteSamples(corpus, samples=samples, sequence=sequence, rank=mesh.rank)

    def step(self) -> float:
        """Makes one update and returns its loss."""
        self.gradients.start()
        batch = self.batches.next()
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        with self.gradients.backward(last=True):
            (loss / self.world_size).backward()
        norm = float(self.gradients.reduce())
        if norm > 1.0:
            self.gradients.scale(1.0 / norm)
        self.optimizer.step()
        self.gradients.gather()
        return float(loss.detach())
