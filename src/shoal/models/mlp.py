"""A multi-layer perceptron: linear layers with an activation between them.

Layers alternate between split outputs (column) and split inputs (row), so that tensor parallelism sums once for each
pair. Weights start at N(0, gain / fan in), biases at 0; gain 2 for activations that lose half (He et al.,
arXiv:1502.01852), 1 otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.config import MLPConfig
from shoal.models.roles import ZEROS, Normal, Role

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}
GAINS = {"relu": 2.0, "gelu": 2.0, "tanh": 1.0}


class MLP(nn.Module):
    """Flat inputs to outputs, through hidden layers of the sizes given; none makes it a linear model."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], *, outputs: int, activation: Literal["relu", "gelu", "tanh"] = "relu"
    ) -> None:
        super().__init__()
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
            law = Normal(math.sqrt((1.0 if is_last else GAINS[self.activation]) / fan_in))
            whole = "head" if is_last else "column"
            roles[f"layers.{index}.weight"] = Role("row" if is_row else whole, law, decay=True)
            roles[f"layers.{index}.bias"] = Role("bias" if is_row else whole, ZEROS, decay=False)
        return roles


def mlp_from(config: MLPConfig) -> MLP:
    """The model of a table `[model]` of kind "mlp"."""
    return MLP(config.inputs, config.hidden, outputs=config.outputs, activation=config.activation)
