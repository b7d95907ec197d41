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
    owners, made = dict(parameters), {}
    for key, dtype in saved.items():
        slot, _, name = key.partition("/")
        if name in owners:
            parameter = owners[name]
            shape = () if slot == "step" else parameter.shape
            made[key] = optimizer.state[parameter][slot] = torch.zeros(shape, dtype=dtype, device=parameter.device)
    return made
