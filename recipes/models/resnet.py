"""A residual net (arXiv:1512.03385) with group normalisation (arXiv:1803.08494), without statistics of the batch."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions around a shortcut; `stride` 2 halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if (inputs, stride) != (outputs, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def build(width: int = 32, classes: int = 10) -> nn.Module:
    """Grey images `[batch, 1, 8, 8]` to logits `[batch, classes]`."""
    widths = [width, width, 2 * width, 4 * width]
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))
