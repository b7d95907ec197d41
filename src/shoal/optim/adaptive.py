"""RMSProp, NAdam and RAdam by PyTorch, and Lion (Chen et al., arXiv:2302.06675, algorithm 2), which PyTorch has not:

    x <- (1 - lr w) x - lr sign(b1 m + (1 - b1) g),     m <- b2 m + (1 - b2) g

All of them treat every number alone, so that a parameter may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.optim.adaptive_config import Lion, NAdam, RAdam, RMSprop
from shoal.optim.declared import Granularity, Slot
from shoal.optim.fused import FusedOptimizer


def rmsprop(config: RMSprop, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's RMSprop."""
    return torch.optim.RMSprop(
        groups, lr=lr, alpha=config.alpha, eps=config.eps, momentum=config.momentum, centered=config.centered
    )


def nadam(config: NAdam, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's NAdam, with AdamW's decay."""
    return torch.optim.NAdam(
        groups,
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        momentum_decay=config.momentum_decay,
        decoupled_weight_decay=True,
    )


def radam(config: RAdam, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's RAdam, with AdamW's decay."""
    return torch.optim.RAdam(
        groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, decoupled_weight_decay=True
    )


def lion(config: Lion, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return LionSign(groups, lr=lr, betas=(config.beta1, config.beta2))


class LionSign(FusedOptimizer):
    """Lion.

    Args:
        params: Parameters, or dictionaries with `params` and their options.
        lr: The learning rate.
        betas: The share of the momentum in the step, and its decay.
        weight_decay: The decay of weights, apart from the gradient.
    """

    works_on: Granularity = "elements"
    slots = (Slot("exp_avg"),)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """One step."""
        beta1, beta2 = group["betas"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
            momentum = state["exp_avg"]
            direction = momentum.lerp(gradient, 1 - beta1).sign_()
            momentum.lerp_(gradient, 1 - beta2)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
