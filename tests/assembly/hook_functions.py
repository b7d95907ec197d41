"""Hooks and a model whose outputs are a dataclass, as users write them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.engine.loop import HookRecord

HEARD = "HOOKS_HEARD"
"""The variable with the file that hooks write to."""


def note(record: HookRecord) -> None:
    """A line: what came, and its measurements."""
    with Path(os.environ[HEARD]).open("a") as file:
        file.write(f"{record.rank} {record.step} {' '.join(sorted(record.values))}\n")


def weight_norm(record: HookRecord) -> dict[str, float]:
    """One more measurement of the model."""
    return {"weight/norm": float(sum(p.detach().square().sum() for p in record.model.parameters()))}


def number_of_ranks(record: HookRecord) -> dict[str, float]:
    """How many ranks answer, by PyTorch's default group."""
    ones = torch.ones(())
    dist.all_reduce(ones)
    return {"ranks/counted": float(ones), "ranks/own": float(dist.get_rank())}


def breaks(record: HookRecord) -> None:
    raise RuntimeError(f"no more after {record.step}")


def returns_text(record: HookRecord) -> dict[str, str]:
    return {"name": "much"}


@dataclass
class Outcome:
    scores: Tensor
    features: Tensor


class Scorer(nn.Module):
    def __init__(self, mapping: bool) -> None:
        super().__init__()
        self.mapping, self.embed, self.head = mapping, nn.Embedding(61, 8), nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Outcome | dict[str, Tensor]:
        features = self.embed(tokens)
        scores = self.head(features)
        return {"scores": scores, "features": features} if self.mapping else Outcome(scores, features)


def scorer(mapping: bool) -> nn.Module:
    return Scorer(mapping)


def score_loss():
    def loss(outputs: Outcome | dict[str, Tensor], targets: Tensor) -> Tensor:
        found = outputs if isinstance(outputs, dict) else vars(outputs)
        losses = nn.functional.cross_entropy(found["scores"].flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape) + 0.01 * found["features"].square().mean(-1)

    return loss
