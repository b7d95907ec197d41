"""From the table `[optimizer]` to the optimizer, with weight decay where it belongs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn import Parameter

from shoal.config.table import implementation_of
from shoal.optim.config import SGD, AdamW, OptimizerConfig
from shoal.optim.fused import FusedAdamW, FusedSGD


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[tuple[str, Parameter, bool]], *, lr: float
) -> torch.optim.Optimizer:
    """The optimizer over `(name, parameter, decays)`. Parameters that do not decay form a group of their own.

    Without any parameter, as on a rank whose piece of a sharded model is empty, its step does nothing.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for _, p, decays in parameters if decays], "weight_decay": config.weight_decay},
        {"params": [p for _, p, decays in parameters if not decays], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]
    return implementation_of(config)(config, groups, lr)


def adamw(config: AdamW, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """AdamW by PyTorch's fused kernel."""
    return FusedAdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps)


def sgd(config: SGD, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """SGD by PyTorch's fused kernel."""
    return FusedSGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov)


def set_rate(optimizer: torch.optim.Optimizer, lr: float | None) -> None:
    """Makes `lr` the rate of every group; None: they keep their own."""
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr


def part_of(optimizer: torch.optim.Optimizer, parameters: Collection[Parameter]) -> torch.optim.Optimizer:
    """An optimizer over some of the parameters of another, to step them alone: the same options and the same state.

    What it writes into its state stands in that of `optimizer`, too. The learning rate is its own.
    """
    wanted = {id(parameter) for parameter in parameters}
    part = copy.copy(optimizer)
    groups = [{**g, "params": [p for p in g["params"] if id(p) in wanted]} for g in optimizer.param_groups]
    part.param_groups = [group for group in groups if group["params"]]
    return part
