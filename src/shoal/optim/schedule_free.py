"""Schedule-free AdamW and SGD (Defazio et al., arXiv:2405.15682, algorithm 1 and equation 6): no decay of the rate, and
so no number of steps to be known.

    y = (1 - b1) z + b1 a                                 the weights: gradients g are taken there
    d = g / (sqrt(v / (1 - b2^t)) + eps),   v <- b2 v + (1 - b2) g^2        (AdamW; SGD: d = g)
    z <- z - lr (d + w y),     c = lr^2 / (lr_1^2 + ... + lr_t^2),     a <- (1 - c) a + c z

The average a is what is evaluated and exported (`shoal.optim.average`). The rate may warm up; it does not decay.
Every number is treated alone, so that a parameter may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.optim.average import AVERAGE
from shoal.optim.declared import Granularity
from shoal.optim.fused import FusedOptimizer
from shoal.optim.schedule_free_config import ScheduleFreeAdamW, ScheduleFreeSGD


def adamw(config: ScheduleFreeAdamW, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return AveragedAdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps)


def sgd(config: ScheduleFreeSGD, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return AveragedSGD(groups, lr=lr, beta=config.beta)


class _ScheduleFree(FusedOptimizer):
    """What both have in common; a subclass says what d is, and b1."""

    works_on: Granularity = "elements"

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """One update. z and a begin at the weights."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if not state:
                one = torch.zeros((), dtype=torch.float64, device=parameter.device)
                state |= {"step": one.to(torch.float32), "squared_rates": one}
                state |= {"z": parameter.detach().clone(), AVERAGE: parameter.detach().clone()}
            state["step"] += 1
            state["squared_rates"] += group["lr"] ** 2
            total = float(state["squared_rates"])
            direction = self.direction(group, gradient, state).add(parameter, alpha=group["weight_decay"])
            state["z"].sub_(direction, alpha=group["lr"])
            state[AVERAGE].lerp_(state["z"], group["lr"] ** 2 / total if total else 0.0)
            parameter.copy_(state["z"].lerp(state[AVERAGE], self.beta(group)))

    def direction(self, group: dict[str, Any], gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """d, which the caller may change."""
        return gradient

    def beta(self, group: dict[str, Any]) -> float:
        """b1."""
        raise NotImplementedError


class AveragedSGD(_ScheduleFree):
    """Schedule-free SGD.

    Args:
        params: Parameters, or dictionaries with `params` and their options.
        lr: The learning rate.
        beta: The share of the average in the weights.
        weight_decay: The decay of weights, taken at y.
    """

    slots = ScheduleFreeSGD().slots

    def __init__(self, params: Iterable[Any], lr: float = 1.0, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, beta=beta, weight_decay=weight_decay)

    def beta(self, group: dict[str, Any]) -> float:
        return group["beta"]


class AveragedAdamW(_ScheduleFree):
    """Schedule-free AdamW.

    Args:
        params: Parameters, or dictionaries with `params` and their options.
        lr: The learning rate.
        betas: The share of the average in the weights, and the decay rate of the second moment.
        eps: Added to the denominator.
        weight_decay: The decay of weights, taken at y.
    """

    slots = ScheduleFreeAdamW().slots

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def direction(self, group: dict[str, Any], gradient: Tensor, state: dict[str, Any]) -> Tensor:
        beta2 = group["betas"][1]
        square = state.setdefault("exp_avg_sq", torch.zeros_like(gradient))
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        return gradient / (square / (1 - beta2 ** int(state["step"]))).sqrt_().add_(group["eps"])

    def beta(self, group: dict[str, Any]) -> float:
        return group["betas"][0]
