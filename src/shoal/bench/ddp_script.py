"""The peer: training a GPT with DDP as a careful person writes it by hand, with the same model and kernels.

It has everything that makes a DDP script fast: gradients as views of the buckets, fused AdamW, gradients set to None,
data from a memory map. It uses nothing of Shoal's engine, feed or buckets.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.bench.training_job import MODEL
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT


class Script:
    """One model with its optimizer; `step` is the body of the script's loop."""

    def __init__(
        self, model: nn.Module, corpus: Path, *, samples: int, sequence: int, rank: int, distributed: bool
    ) -> None:
        """`distributed`: whether DDP wraps the model, over PyTorch's default group."""
        self.optimizer = torch.optim.AdamW(decay_groups(model), lr=3e-4, betas=(0.9, 0.95), fused=True)
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if distributed else model
        self.model = wrapped
        self.parameters = list(model.parameters())
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


class ByteSamples:
    """Sequences of bytes from random places of a file; every rank draws its own."""

    def __init__(self, corpus: Path, *, samples: int, sequence: int, rank: int) -> None:
        self.data = np.memmap(corpus, dtype=np.uint8, mode="r")
        self.samples, self.sequence = samples, sequence
        self.random = np.random.default_rng(rank)

    def next(self) -> Tensor:
        """`[samples, sequence + 1]`, int64."""
        starts = self.random.integers(0, len(self.data) - self.sequence - 1, self.samples)
        rows = np.stack([self.data[start : start + self.sequence + 1] for start in starts]).astype(np.int64)
        return torch.from_numpy(rows)


def new_gpt(config: GPTConfig = MODEL) -> GPT:
    """The model on the CPU in float32, with the parameters of seed 0."""
    model = build(config)
    initialise(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(model, GPT)
    return model


def decay_groups(model: nn.Module) -> list[dict]:
    """The optimizer's groups: weight decay for matrices, none for the rest."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
