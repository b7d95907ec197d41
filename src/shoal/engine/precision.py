"""Precision: the dtype of parameters, the autocast of the forward, and the scale of the loss.

Parameters, gradients, reductions and norms are float32 or float64. bfloat16 and float16 are autocast: matrix products
run in them, what needs range does not. Under float8 blocks have linear layers of their own beside the autocast of
bfloat16. float16's gradients underflow, so the loss is multiplied by a scale before the
backward and the gradients divided by it before the optimizer (arXiv:1710.03740, 3.2).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shoal.engine.config import BFloat16, Float8, Float16, Float64, PrecisionConfig
from shoal.errors import EnvironmentFault, MissingExtra, UserCodeError
from shoal.memory.recompute import blocks_of

SMALLEST_SCALE = 1.0


@dataclass
class LossScaler:
    """The scale of the loss. Dynamic: halved after an overflow, doubled after `growth_steps` finite steps."""

    scale: float
    dynamic: bool
    growth_steps: int
    finite_in_a_row: int = 0

    def update(self, *, finite: bool) -> None:
        """Learns of a step. A fixed scale stays."""
        if not self.dynamic:
            return
        self.finite_in_a_row = self.finite_in_a_row + 1 if finite else 0
        if not finite:
            self.scale = max(SMALLEST_SCALE, self.scale / 2)
        elif self.finite_in_a_row >= self.growth_steps:
            self.scale, self.finite_in_a_row = self.scale * 2, 0

    def to_state(self) -> dict[str, Any]:
        return {"dynamic": self.dynamic, "scale": self.scale, "finite_in_a_row": self.finite_in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved scale; a run file that now says something else keeps what it says."""
        if self.dynamic and state["dynamic"]:
            self.scale, self.finite_in_a_row = float(state["scale"]), int(state["finite_in_a_row"])


@dataclass(frozen=True)
class Precision:
    """`parameters`: the dtype that the model is stored in. `compute`: the dtype of autocast, None without it."""

    parameters: torch.dtype
    compute: torch.dtype | None

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Around the forward and the loss."""
        if self.compute is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.compute)


def precision_of(config: PrecisionConfig) -> Precision:
    """What a table `[precision]` means."""
    if isinstance(config, Float64):
        return Precision(torch.float64, None)
    if isinstance(config, BFloat16 | Float8):
        return Precision(torch.float32, torch.bfloat16)
    return Precision(torch.float32, torch.float16 if isinstance(config, Float16) else None)


def scaler_of(config: PrecisionConfig) -> LossScaler:
    """The loss scale of a table `[precision]`; a fixed 1 for all but float16."""
    if not isinstance(config, Float16):
        return LossScaler(1.0, dynamic=False, growth_steps=1)
    if isinstance(config.loss_scale, str):
        return LossScaler(config.initial_scale, dynamic=True, growth_steps=config.growth_steps)
    return LossScaler(config.loss_scale, dynamic=False, growth_steps=config.growth_steps)


# Linear layers that multiply in float8, as torchao has them (`Float8Linear`).
#
# Forward and both products of the backward cast their factors to float8: inputs and weights to e4m3, gradients to e5m2
# (rowwise: e4m3 all), each scaled by its own largest magnitude (Micikevicius et al., arXiv:2209.05433). Parameters keep
# their names and their dtype. The layers of blocks are replaced; embeddings, head, norms and attention compute as under
# bfloat16. A product needs sizes that are multiples of 16.


MULTIPLE = 16
OLDEST_CAPABILITY = (8, 9)
"""Of CUDA devices with float8 products: Ada and Hopper."""


def use_float8(model: nn.Module, config: PrecisionConfig, *, device: torch.device) -> None:
    """Replaces the linear layers in the blocks of `model`, in place, where `config` asks for float8.

    Raises:
        MissingExtra: torchao is not installed.
        EnvironmentFault: `device` has no float8 products, and `config` does not emulate them.
        UserCodeError: no block has a linear layer whose sizes are multiples of 16.
    """
    if not isinstance(config, Float8):
        return
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtra("torchao", extra="float8", purpose='precision.kind = "float8"')
    _check_device(device, config)
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear_utils import convert_to_float8_training

    wanted = {id(layer) for layer in _layers(model)}
    if not wanted:
        raise UserCodeError(
            f"{type(model).__name__} has no block with a linear layer whose sizes are multiples of {MULTIPLE}: hold "
            'blocks in an nn.ModuleList, change their widths, or set precision.kind = "bfloat16"'
        )
    recipe = replace(Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in wanted, config=recipe)


def _layers(model: nn.Module) -> Iterator[nn.Linear]:
    for block in blocks_of(model).values():
        for module in block.modules():
            if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                continue
            if module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0:
                yield module


def _check_device(device: torch.device, config: Float8) -> None:
    if config.emulate:
        return
    found = device.type
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or capability >= OLDEST_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} (compute capability {'.'.join(map(str, capability))})"
    raise EnvironmentFault(
        f'precision.kind = "float8" on {found}: float8 products need a GPU of compute capability 8.9 or newer (Ada, '
        'Hopper, Blackwell); use precision.kind = "bfloat16", or set precision.emulate = true to see what rounding does'
    )
