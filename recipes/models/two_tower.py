"""Two towers and a contrastive loss (CLIP, arXiv:2103.00020): which halves belong to one digit?"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

TEMPERATURE = 0.1


def tower(width: int) -> nn.Sequential:
    """Halves of images `[batch, 32]` to embeddings `[batch, 32]`."""
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 32))


class Towers(nn.Module):
    """Upper and lower halves to embeddings of length 1, one tower for each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.upper, self.lower = tower(width), tower(width)

    def forward(self, upper: Tensor, lower: Tensor) -> dict[str, Tensor]:
        return {"upper": F.normalize(self.upper(upper), dim=-1), "lower": F.normalize(self.lower(lower), dim=-1)}


class Halves:
    """scikit-learn's digits, cut in two; every fifth is held out."""

    def __init__(self, held_out: bool) -> None:
        from sklearn.datasets import load_digits

        images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
        self.images = images[(torch.arange(len(images)) % 5 == 0) == held_out]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], int]:
        return (self.images[index, :32], self.images[index, 32:]), 0


def build(width: int = 128) -> Towers:
    """The module of the run file."""
    return Towers(width)


def contrastive() -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The right half among those of the whole global batch, both ways; one value per sample."""

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        uppers, own = shoal.gather_samples(outputs["upper"])
        lowers, _ = shoal.gather_samples(outputs["lower"])
        forth = F.cross_entropy(outputs["upper"] @ lowers.T / TEMPERATURE, own, reduction="none")
        back = F.cross_entropy(outputs["lower"] @ uppers.T / TEMPERATURE, own, reduction="none")
        return (forth + back) / 2

    return loss


def halves() -> tuple[Halves, Halves]:
    """Training and held-out images."""
    return Halves(held_out=False), Halves(held_out=True)
