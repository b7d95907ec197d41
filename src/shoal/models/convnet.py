"""A small convolutional net for small images: plain 3x3 layers, two halvings of the resolution, a global average.

The average makes it indifferent to the size of the images: 8x8 digits, 28x28 and 32x32 pictures go through the same
layers. Weights start at N(0, 2 / fan in) (He et al., arXiv:1502.01852).
"""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.grouped_norm import GroupedBatchNorm2d
from shoal.models.law import ONES, ZEROS, Normal
from shoal.models.roles import Role

FEATURE_GROUPS = 8


class ConvNet(nn.Module):
    """Images to the logits of their classes. `norm` and `group_samples` as in `ConvNetConfig`."""

    def __init__(
        self, *, channels: int, classes: int, width: int, norm: Literal["group", "batch"] = "group", group_samples: int = 16
    ) -> None:
        super().__init__()
        plan = ((channels, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 2))
        self.layers = nn.ModuleList(
            ConvLayer(inputs, outputs, stride=stride, norm=_norm(norm, outputs, group_samples))
            for inputs, outputs, stride in plan
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Floating images `[batch, channels, height, width]` to logits `[batch, classes]`."""
        x = images
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=(2, 3)))

    def parameter_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        convolutions = {
            f"layers.{index}.conv.weight": Role("replicated", Normal(_he_std(layer.conv.weight)), decay=True)
            for index, layer in enumerate(self.layers)
        }
        return {
            **convolutions,
            "*.norm.weight": Role("norm", ONES, decay=False),
            "*.norm.bias": Role("norm", ZEROS, decay=False),
            "head.weight": Role("head", Normal(1 / math.sqrt(self.head.in_features)), decay=True),
            "head.bias": Role("head", ZEROS, decay=False),
        }


class ConvLayer(nn.Module):
    """Convolution, norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


def _norm(kind: Literal["group", "batch"], features: int, group_samples: int) -> nn.Module:
    if kind == "batch":
        return GroupedBatchNorm2d(features, group_samples)
    return nn.GroupNorm(FEATURE_GROUPS, features)


def _he_std(weight: Tensor) -> float:
    return math.sqrt(2 / weight[0].numel())
