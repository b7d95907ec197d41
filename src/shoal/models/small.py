"""Two small models: a convolutional net for images, and a multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.batch_norm import GroupedBatchNorm
from shoal.models.config import ConvNetConfig, MLPConfig
from shoal.models.roles import ONES, ZEROS, Normal, Role, Widened, widened

# A small convolutional net for small images: plain 3x3 layers, two halvings by maximum, a global average.
#
# Halving by maximum was worth one per cent on handwritten digits against halving by stride. The average makes the net
# indifferent to the size of the images: 8x8 digits, 28x28 and 32x32 pictures go through the same layers. Weights start
# at N(0, 2 / fan in) (He et al., arXiv:1502.01852).


FEATURE_GROUPS = 8
KERNEL = 3
HALVING_LAYERS = (1, 3)


class ConvNet(nn.Module):
    """Images to the logits of their classes. `norm` and `group_samples` as in `ConvNetConfig`."""

    def __init__(
        self,
        *,
        channels: int,
        classes: int,
        width: int,
        norm: Literal["group", "batch"] = "group",
        group_samples: int = 16,
    ) -> None:
        super().__init__()
        sizes = (channels, width, width, 2 * width, 2 * width, 4 * width)
        self.fans_in = tuple(KERNEL**2 * inputs for inputs in sizes[:-1])
        self.layers = nn.ModuleList(
            ConvLayer(inputs, outputs, norm=_norm(norm, outputs, group_samples), halve=index in HALVING_LAYERS)
            for index, (inputs, outputs) in enumerate(pairwise(sizes))
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Floating images `[batch, channels, height, width]`, of 4x4 pixels at least, to logits `[batch, classes]`."""
        x = images
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=(2, 3)))

    def parameter_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        convolutions = {
            f"layers.{index}.conv.weight": Role("replicated", Normal(math.sqrt(2 / fan_in)), decay=True)
            for index, fan_in in enumerate(self.fans_in)
        }
        return {
            **convolutions,
            "*.norm.weight": Role("norm", ONES, decay=False),
            "*.norm.bias": Role("norm", ZEROS, decay=False),
            "head.weight": Role("head", Normal(1 / math.sqrt(self.head.in_features)), decay=True),
            "head.bias": Role("head", ZEROS, decay=False),
        }


class ConvLayer(nn.Module):
    """Convolution, norm, ReLU; then, to `halve` height and width, the maximum of 2x2 pixels."""

    def __init__(self, inputs: int, outputs: int, *, norm: nn.Module, halve: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=KERNEL, padding=KERNEL // 2, bias=False)
        self.norm = norm
        self.halve = halve

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(x, 2) if self.halve else x


def _norm(kind: Literal["group", "batch"], features: int, group_samples: int) -> nn.Module:
    if kind == "batch":
        return GroupedBatchNorm(features, group_samples)
    return nn.GroupNorm(FEATURE_GROUPS, features)


def convnet_from(config: ConvNetConfig) -> ConvNet:
    """The model of a table `[model]` of kind "convnet"."""
    return ConvNet(
        channels=config.channels,
        classes=config.classes,
        width=config.width,
        norm=config.norm,
        group_samples=config.group_samples,
    )


# A multi-layer perceptron: linear layers with an activation between them.
#
# Layers alternate between split outputs (column) and split inputs (row), so that tensor parallelism sums once for each
# pair. Weights start at N(0, gain / fan in), biases at 0; gain 2 for activations that lose half (He et al.,
# arXiv:1502.01852), 1 otherwise. With `scaling = "mup"` (arXiv:2203.03466, table 3) the last layer's are smaller by
# sqrt(base_width / fan in), and rates follow from the roles (`shoal.optim.mup`).


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}
GAINS = {"relu": 2.0, "gelu": 2.0, "tanh": 1.0}


class MLP(nn.Module):
    """Flat inputs to outputs, through hidden layers of the sizes given; none makes it a linear model."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        *,
        outputs: int,
        activation: Literal["relu", "gelu", "tanh"] = "relu",
        base_width: int | None = None,
    ) -> None:
        super().__init__()
        self.base_width = base_width
        self.activation = activation
        self.sizes = (inputs, *hidden, outputs)
        self.layers = nn.ModuleList(nn.Linear(here, there) for here, there in pairwise(self.sizes))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, ...]`, flattened to `[batch, inputs]`, to `[batch, outputs]`. Whole numbers become floating ones."""
        x = x.flatten(1)
        if not x.is_floating_point():
            x = x.to(next(self.layers.parameters()).dtype)
        for layer in self.layers[:-1]:
            x = ACTIVATIONS[self.activation](layer(x))
        return self.layers[-1](x)

    def parameter_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        roles = {}
        for index, fan_in in enumerate(self.sizes[:-1]):
            is_last, is_row = index == len(self.layers) - 1, index % 2 == 1
            variance = (1.0 if is_last else GAINS[self.activation]) / fan_in
            law = Normal(math.sqrt(variance / ((self._times(fan_in) or 1.0) if is_last else 1.0)))
            whole = "head" if is_last else "column"
            weight, bias = self._widened(index)
            roles[f"layers.{index}.weight"] = Role("row" if is_row else whole, law, True, weight)
            roles[f"layers.{index}.bias"] = Role("bias" if is_row else whole, ZEROS, False, bias)
        return roles

    def _times(self, features: int) -> float | None:
        return None if self.base_width is None else features / self.base_width

    def _widened(self, index: int) -> tuple[Widened | None, Widened | None]:
        """Of the weight of a layer, and of its bias; that of the last layer does not grow."""
        inner, outer = self._times(self.sizes[index]), self._times(self.sizes[index + 1])
        if index == len(self.layers) - 1:
            return widened("output", inner), None
        return widened("input", outer) if index == 0 else widened("hidden", inner), widened("input", outer)


def mlp_from(config: MLPConfig) -> MLP:
    """The model of a table `[model]` of kind "mlp"."""
    return MLP(
        config.inputs,
        config.hidden,
        outputs=config.outputs,
        activation=config.activation,
        base_width=config.base_width,
    )
