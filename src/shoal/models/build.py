"""From a `[model]` table to the module. Call it under `torch.device("meta")`; `initialise` brings the storage."""

from __future__ import annotations

from torch import nn

from shoal.config.table import implementation_of
from shoal.models.config import BuiltInModel


def build(config: BuiltInModel) -> nn.Module:
    """One of Shoal's own models, on the current default device."""
    return implementation_of(config)(config)


def parameter_count(module: nn.Module) -> int:
    """Numbers in the module's parameters, a tied parameter counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
