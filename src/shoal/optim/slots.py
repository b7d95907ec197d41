"""An optimizer's state as named tensors: `exp_avg/layers.0.weight`. What checkpoints save and load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter


def named_slots(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Tensor]:
    """Every tensor of the state, by slot and parameter name. Empty before the first step."""
    return {
        f"{slot}/{name}": value
        for name, parameter in parameters
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def make_slots(
    optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Parameter]], saved: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Empty tensors for the slots that were `saved` (name and dtype), put in the optimizer's state, to be filled.

    A slot has the shape of its parameter, but for `step`, which is one number.
    """
    made: dict[str, Tensor] = {}
    for name, parameter in parameters:
        for key, dtype in saved.items():
            slot, _, owner = key.partition("/")
            if owner == name:
                shape = () if slot == "step" else parameter.shape
                device = "cpu" if slot == "step" and parameter.device.type == "cpu" else parameter.device
                made[key] = optimizer.state[parameter][slot] = torch.zeros(shape, dtype=dtype, device=device)
    return made
