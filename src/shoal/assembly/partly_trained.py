"""What a run file changes in a model before anything else is made of it: adapters, rounded weights, frozen layers."""

from __future__ import annotations

import torch
from torch import nn

from shoal.models.adapters import adapt, is_adapter
from shoal.models.build import draw
from shoal.models.quantisation import quantise
from shoal.models.roles import roles_of
from shoal.runfile.run_file import RunFile
from shoal.sparsity.freezing import freeze


def partly_trained(model: nn.Module, run_file: RunFile) -> nn.Module:
    """With the adapters of `[adapter]`, the rounding of `[quantisation]` and what `[freeze]` freezes, in place.

    Raises `ConfigError`.
    """
    if run_file.adapter is not None:
        adapt(model, run_file.adapter)
        if not next(model.parameters()).is_meta:
            _draw_adapters(model, seed=run_file.run.seed)
    if run_file.quantisation is not None:
        quantise(model, run_file.quantisation)
    if run_file.freeze is not None:
        freeze(model, run_file.freeze)
    return model


@torch.no_grad()
def _draw_adapters(model: nn.Module, *, seed: int) -> None:
    """The first values of adapters in a model that came with its own."""
    roles = roles_of(model)
    for name, parameter in model.named_parameters():
        law = roles[name].init
        if is_adapter(name) and law is not None:
            shape = tuple(parameter.shape)
            parameter.copy_(draw(law, name, seed=seed, global_shape=shape, offsets=(0,) * len(shape), shape=shape))
