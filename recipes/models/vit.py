"""A vision transformer (arXiv:2010.11929) for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.models.attention import Block


class ViT(nn.Module):
    """Grey images `[batch, 1, 8, 8]` to logits `[batch, classes]`: patches of 2 x 2, and a token that is read out."""

    def __init__(self, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


def build(width: int = 64, depth: int = 4, heads: int = 4, classes: int = 10) -> ViT:
    """The module of the run file."""
    return ViT(width, depth, heads, classes)
