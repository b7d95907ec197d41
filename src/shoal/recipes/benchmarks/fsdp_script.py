"""The peer of ZeRO-3: training a GPT with `fully_shard` as a careful person writes it by hand."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.models.gpt import GPT
from shoal.recipes.benchmarks.ddp_script import ByteSamples, decay_groups


class ShardedScript:
    """One model with its optimizer, a unit for each block; `step` is the body of the script's loop."""

    def __init__(self, model: GPT, tokens: Path, *, samples: int, sequence: int, rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(decay_groups(model), lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.batches = ByteSamples(tokens, samples=samples, sequence=sequence, rank=rank)

    def step(self) -> float:
        """One update; its loss."""
        batch = self.batches.next()
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
