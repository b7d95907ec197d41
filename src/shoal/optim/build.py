"""From the table `[optimizer]` to the optimizer, with weight decay where it belongs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from shoal.config.table import implementation_of
from shoal.errors import ConfigError
from shoal.optim.config import SGD, Adagrad, AdamW, OptimizerConfig
from shoal.optim.fused import FusedAdamW, FusedSGD


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[tuple[str, Parameter, bool]],
    *,
    lr: float,
    sparse: Collection[str] = (),
    numbers: Mapping[str, int] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over `(name, parameter, decays)`. Parameters that do not decay form a group of their own, and so do
    those of fewer numbers than the optimizer's `least_numbers`; `numbers` are those of whole parameters by name, where
    `parameters` are parts of them.

    The gradients of those named `sparse` have the rows that a step touched alone, and form a third group. Without any
    parameter, as on a rank whose piece of a sharded model is empty, its step does nothing.

    Raises `ConfigError` for an optimizer that moves rows which a step has not touched.
    """
    parameters, tables = list(parameters), set(sparse)
    if tables and not config.takes_sparse:
        kind = config.variant
        raise ConfigError(
            f'optimizer.kind = "{kind}" has moments that move every row in every step, and the gradient of '
            f'{sorted(tables)[0]} is sparse: use "adagrad", or "sgd" without momentum'
        )
    of_tables = [p for name, p, _ in parameters if name in tables]
    parameters = [one for one in parameters if one[0] not in tables]
    whole = numbers or {}
    groups = [
        {
            "params": [
                p
                for name, p, decays in parameters
                if decays == decaying and (whole.get(name, p.numel()) < config.least_numbers) == small
            ],
            "weight_decay": config.weight_decay if decaying else 0.0,
            **({"small": True} if small else {}),
        }
        for small in (False, True)
        for decaying in (True, False)
    ]
    if of_tables:
        groups.append({"params": of_tables, "weight_decay": 0.0, "fused": False})
    groups = [group for group in groups if group["params"]] or groups[:1]
    return implementation_of(config)(config, groups, lr)


def adamw(config: AdamW, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """AdamW by PyTorch's fused kernel."""
    return FusedAdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps)


def sgd(config: SGD, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """SGD by PyTorch's fused kernel."""
    return FusedSGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov)


def adagrad(config: Adagrad, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's Adagrad."""
    return torch.optim.Adagrad(groups, lr=lr, eps=config.eps)


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
