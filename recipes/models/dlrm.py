"""Recommendation in the shape of DLRM (arXiv:1906.00091): numbers and ids, their products, to a click."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import shoal

FEATURES, NUMBERS = 4, 4


class DLRM(nn.Module):
    """Numbers `[batch, 4]` and ids `[batch, 4]` to logits `[batch, 2]`. All features share one table, one after the
    other, so that a step makes one exchange."""

    def __init__(self, rows: int, width: int, split: Literal["rows", "columns"]) -> None:
        super().__init__()
        self.rows = rows
        self.table = shoal.EmbeddingTable(FEATURES * rows, width, split=split, std=0.3)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, width))
        pairs = (FEATURES + 1) * FEATURES // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(numbers)
        vectors = self.table(ids + self.rows * torch.arange(FEATURES, device=ids.device))
        points = torch.cat([bottom[:, None], vectors], 1)
        first, second = torch.triu_indices(FEATURES + 1, FEATURES + 1, offset=1, device=ids.device)
        products = (points @ points.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([bottom, products], 1))


class Clicks:
    """A user clicks where the hidden vectors of two ids, and the numbers, agree; some ids are frequent."""

    def __init__(self, samples: int, rows: int, seed: int) -> None:
        hidden = torch.randn(FEATURES, rows, 2, generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(seed)
        self.numbers = torch.randn(samples, NUMBERS, generator=generator)
        self.ids = (torch.rand(samples, FEATURES, generator=generator) ** 3 * rows).long()
        own = hidden[torch.arange(FEATURES), self.ids]
        self.clicked = ((own[:, 0] * own[:, 1]).sum(1) + own[:, 2, 0] + self.numbers[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (self.numbers[index], self.ids[index]), self.clicked[index]


def build(rows: int = 2_000, width: int = 16, split: Literal["rows", "columns"] = "rows") -> DLRM:
    """The module of the run file."""
    return DLRM(rows, width, split)


def clicks(rows: int = 2_000) -> tuple[Clicks, Clicks]:
    """Training and held-out clicks."""
    return Clicks(60_000, rows, 2), Clicks(4_000, rows, 3)
