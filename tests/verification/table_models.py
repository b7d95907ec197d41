"""Models with embedding tables, as users write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shoal

ROWS, FEATURES = 1000, 3


class Clicks:
    """Numbers and ids of some features, some of them often; whether it was clicked."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(index)
        numbers = torch.randn(4, generator=generator)
        ids = (torch.rand(FEATURES, generator=generator) ** 3 * self.rows).long()
        return (numbers, ids), ((numbers[0] + ids.sum() % 2) > 0.5).float()


class Recommender(nn.Module):
    """The vectors of all features and the numbers, through two layers, to one logit."""

    def __init__(self, table: nn.Module, width: int) -> None:
        super().__init__()
        self.table = table
        self.hidden, self.out = nn.Linear(4 + FEATURES * width, 16), nn.Linear(16, 1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        vectors = self.table(ids).flatten(1)
        return self.out(self.hidden(torch.cat([numbers, vectors], 1)).relu())[:, 0]


def recommender(split: str = "rows", rows: int = ROWS, width: int = 8) -> nn.Module:
    return Recommender(shoal.EmbeddingTable(rows, width, split=split, std=0.5), width)  # type: ignore[arg-type]


def clicks(rows: int = ROWS) -> Clicks:
    return Clicks(rows)


def click_loss():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    return loss
