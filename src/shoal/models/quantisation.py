"""Quantisation-aware training: the forward rounds weights to few bits, the backward passes the rounding by.

    s = max |w| / q_max  of each row, or of each group of a row       q = round(w / s)
    y = (s q) x,         dL/dw = dL/d(s q)                            the straight-through estimator, arXiv:1308.3432

Scales are symmetric and follow the weights in every forward (Jacob et al., arXiv:1712.05877, without their moving
averages, which only activations need; these stay as they are). A layer stays an `nn.Linear` under its name with the
weight that is trained, so that checkpoints are those of the plain model; `integers` gives what is to be deployed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.models.adapters import AdaptedLinear, chosen_layers
from shoal.models.quantisation_config import QuantisationConfig

SCALE = "_scale"
"""What the name of a weight's scales has more than that of the weight."""


class QuantisedLinear(AdaptedLinear):
    """A linear layer that computes with rounded weights."""

    def __init__(self, layer: nn.Linear, config: QuantisationConfig) -> None:
        super().__init__(layer)
        self.config = config

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return F.linear(input, rounded(self.weight, self.config), self.bias)


def rounded(weight: Tensor, config: QuantisationConfig) -> Tensor:
    """`weight` `[out, in]` as integers of `config` stand for it; its gradient is that of `weight`."""
    numbers, scales = integers(weight.detach(), config)
    grid = restored(numbers, scales, dtype=weight.dtype)
    return weight + (grid - weight).detach()


def integers(weight: Tensor, config: QuantisationConfig) -> tuple[Tensor, Tensor]:
    """The integers `[out, in]`, int8, and the scales `[out, groups]` of a weight."""
    groups = weight.unflatten(1, (-1, config.group or weight.shape[1]))
    scales = groups.abs().amax(2) / config.largest
    numbers = (groups / scales.clamp(min=torch.finfo(weight.dtype).tiny)[..., None]).round()
    return numbers.clamp(-config.largest, config.largest).to(torch.int8).flatten(1), scales


def restored(numbers: Tensor, scales: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The weight `[out, in]` that integers and scales stand for."""
    groups = numbers.unflatten(1, (scales.shape[1], -1)).to(dtype)
    return (groups * scales.to(dtype)[..., None]).flatten(1)


def quantise(model: nn.Module, config: QuantisationConfig) -> None:
    """Has the linear layers of `model` that `config` names compute with rounded weights, in place.

    Raises `ConfigError` where a pattern matches nothing, or the group does not divide a layer.
    """
    for name, layer in chosen_layers(model, config.layers, key="quantisation.layers").items():
        if config.group is not None and layer.in_features % config.group:
            raise ConfigError(
                f"quantisation.group = {config.group}: the rows of {name} have {layer.in_features} weights, which it "
                "does not divide; use another, or leave the layer out of quantisation.layers"
            )
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, QuantisedLinear(layer, config))


def deployed(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`weights` with int8 integers in the place of those that layers of `model` round, and their scales under
    `<weight>_scale`.
    """
    found = dict(weights)
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            weight = f"{name}.weight"
            found[weight], found[weight + SCALE] = integers(weights[weight], module.config)
    return found
