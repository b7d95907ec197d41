"""Precision: the dtype of parameters, the autocast of the forward, and the scale of the loss.

Parameters, gradients, reductions and norms are float32 or float64. bfloat16 and float16 are autocast: matrix products
run in them, what needs range does not. Under float8 blocks have linear layers of their own beside the autocast of
bfloat16 (`engine.float8`). float16's gradients underflow, so the loss is multiplied by a scale before the
backward and the gradients divided by it before the optimizer (arXiv:1710.03740, 3.2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from shoal.engine.config import BFloat16, Float8, Float16, Float64, PrecisionConfig

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
