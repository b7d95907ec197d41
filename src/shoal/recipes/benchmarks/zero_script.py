"""The loop of the DDP script on Shoal's syncs: what the stages of ZeRO are measured with, without the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.nn.functional as F

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.gradients.config import GradientsConfig
from shoal.models.gpt import GPT
from shoal.optim.build import build_optimizer
from shoal.optim.config import AdamW
from shoal.recipes.benchmarks.ddp_script import ByteSamples
from shoal.sync.build import build_sync
from shoal.sync.owned import Trained
from shoal.topology.holding import Ranks, held


class ZeroScript:
    """One model, its sync and its optimizer; `step` is one update. `groups`: where others than those of `mesh`."""

    def __init__(
        self,
        model: GPT,
        tokens: Path,
        mesh: Mesh,
        groups: Callable[[Ranks], Collective] | None = None,
        /,
        *,
        zero: int,
        samples: int,
        sequence: int,
    ) -> None:
        trained = [
            Trained(held(mesh.layout, mesh.rank, name, tuple(p.shape)), p) for name, p in model.named_parameters()
        ]  # fmt: skip
        self.model, self.world = model, mesh.layout.world_size
        self.sync = build_sync(
            GradientsConfig(),
            zero,
            trained,
            model=model,
            groups=groups or mesh.ranks,
            replica=mesh.axis(*mesh.layout.replica_axes),
            blocks=list(model.blocks),
        )
        owned = [(o.name, o.parameter, len(o.holding.global_shape) > 1) for o in self.sync.owned]
        self.optimizer = build_optimizer(AdamW(), owned, lr=3e-4)
        self.batches = ByteSamples(tokens, samples=samples, sequence=sequence, rank=mesh.rank)

    def step(self) -> float:
        """One update; its loss."""
        self.sync.start()
        batch = self.batches.next()
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        with self.sync.backward(last=True):
            (loss / self.world).backward()
        norm = float(self.sync.gradients())
        if norm > 1.0:
            self.sync.scale(1.0 / norm)
        self.optimizer.step()
        self.sync.parameters()
        return float(loss.detach())
