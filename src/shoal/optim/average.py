"""Averages of weights beside them, under which a run is evaluated, and Lookahead; for every optimizer.

    EMA         a <- d a + (1 - d) x,     from the first update's weights on
    SWA         a <- a + (x - a) / n      at the n-th update that counts            (Izmailov et al., arXiv:1803.05407)
                both also of frozen layers (`Resting`)
    Lookahead   every k updates:  s <- s + c (x - s),  x <- s                       (Zhang et al., arXiv:1907.08610)

They are slots of the optimizer (`average`, `slow_weight`), divided and saved as moments are. Hooks of the optimizer's
step move them, number by number, so that they know of no layout. Schedule-free optimizers keep an `average` themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.optim.declared import EMA, AverageConfig, Granularity, Lookahead
from shoal.optim.fused import FusedOptimizer, counted
from shoal.optim.kinds import ScheduleFreeAdamW, ScheduleFreeSGD

AVERAGE, COUNT, SLOW = "average", "averaged", "slow_weight"


def keep_average(optimizer: torch.optim.Optimizer, config: AverageConfig) -> None:
    """From now on every step moves the average of what it has updated."""
    aside: dict[Parameter, dict[str, Any]] = {}

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _stepped(optimizer):
            state = optimizer.state.get(parameter, {})
            if state and state.keys() <= {AVERAGE, COUNT}:  # trained again: optimizers begin an empty state
                aside[parameter] = optimizer.state.pop(parameter)

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        while aside:
            parameter, kept = aside.popitem()
            optimizer.state[parameter].update(kept)
        for parameter in _stepped(optimizer):
            _move(optimizer.state[parameter], parameter, config)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


class Resting:
    """What `optimizer` keeps of weights that are not trained for a while: their average alone, for that is the model
    which is evaluated. It goes on with every update of the others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: AverageConfig | None) -> None:
        self._optimizer, self._config = optimizer, config

    def forget(self, parameter: Parameter) -> None:
        """Drops the rest."""
        if isinstance(self._optimizer, _ScheduleFree):
            return  # weights and average go on from each other
        state = self._optimizer.state.pop(parameter, {})
        if AVERAGE in state:
            self._optimizer.state[parameter] = {name: state[name] for name in (AVERAGE, COUNT) if name in state}

    @torch.no_grad()
    def updated(self, parameter: Parameter) -> None:
        """After an update that has left `parameter` alone."""
        state = self._optimizer.state.get(parameter, {})
        if self._config is not None and AVERAGE in state:
            _move(state, parameter, self._config)


def _move(state: dict[str, Any], parameter: Parameter, config: AverageConfig) -> None:
    if AVERAGE not in state:
        state[AVERAGE] = parameter.detach().clone()
    average = state[AVERAGE]
    if isinstance(config, EMA):
        average.lerp_(parameter, 1 - config.decay)
        return
    count = state.setdefault(COUNT, torch.zeros((), dtype=torch.float64, device=parameter.device))
    count += 1
    since = int(count) - config.start
    if since <= 0:
        average.copy_(parameter)
    elif since % config.every == 0:
        average.lerp_(parameter, 1 / (1 + since // config.every))


def look_ahead(optimizer: torch.optim.Optimizer, config: Lookahead) -> None:
    """From now on weights go back, every so many steps, towards where they were."""
    first: dict[Parameter, Tensor] = {}

    @torch.no_grad()
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _stepped(optimizer):
            if SLOW not in optimizer.state.get(parameter, {}):
                first[parameter] = parameter.detach().clone()  # not in the state yet: optimizers begin an empty one

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _stepped(optimizer):
            state = optimizer.state[parameter]
            if parameter in first:
                state[SLOW] = first.pop(parameter)
                state["looked"] = torch.zeros((), dtype=torch.float64, device=parameter.device)
            state["looked"] += 1
            if int(state["looked"]) % config.every == 0:
                parameter.copy_(state[SLOW].lerp_(parameter, config.share))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _stepped(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@contextmanager
def averages_shown(optimizers: Iterable[torch.optim.Optimizer], gather: Callable[[], None]) -> Iterator[None]:
    """Inside, the model computes with averages, where there are any; afterwards with the same weights as before.

    `gather` brings what optimizers hold to where the model computes. All ranks of a replica enter it together.
    """
    optimizers = [one for one in optimizers if any(AVERAGE in state for state in one.state.values())]
    if not optimizers:
        yield
        return
    _swap(optimizers)
    gather()
    try:
        yield
    finally:
        _swap(optimizers)
        gather()


@torch.no_grad()
def _swap(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if AVERAGE in state:
                kept = parameter.detach().clone()
                parameter.copy_(state[AVERAGE])
                state[AVERAGE].copy_(kept)


# Schedule-free AdamW and SGD (Defazio et al., arXiv:2405.15682, algorithm 1 and equation 6): no decay of the rate, and
# so no number of steps to be known.
#
#     y = (1 - b1) z + b1 a                                 the weights: gradients g are taken there
#     d = g / (sqrt(v / (1 - b2^t)) + eps),   v <- b2 v + (1 - b2) g^2        (AdamW; SGD: d = g)
#     z <- z - lr (d + w y),     c = lr^2 / (lr_1^2 + ... + lr_t^2),     a <- (1 - c) a + c z
#
# The average a is what is evaluated and exported. The rate may warm up; it does not decay.
# Every number is treated alone, so that a parameter may be cut anywhere.


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
                zero = torch.zeros((), dtype=torch.float64, device="cpu")
                state |= {"step": zero.to(torch.float32), "squared_rates": zero}
                state |= {"z": parameter.detach().clone(), AVERAGE: parameter.detach().clone()}
            step, total = int(counted(state)), counted(state, "squared_rates", by=group["lr"] ** 2)
            direction = self.direction(group, gradient, state, step).add(parameter, alpha=group["weight_decay"])
            state["z"].sub_(direction, alpha=group["lr"])
            state[AVERAGE].lerp_(state["z"], group["lr"] ** 2 / total if total else 0.0)
            parameter.copy_(state["z"].lerp(state[AVERAGE], self.beta(group)))

    def direction(self, group: dict[str, Any], gradient: Tensor, state: dict[str, Any], step: int) -> Tensor:
        """d of update `step`, which the caller may change."""
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

    def direction(self, group: dict[str, Any], gradient: Tensor, state: dict[str, Any], step: int) -> Tensor:
        beta2 = group["betas"][1]
        square = state.setdefault("exp_avg_sq", torch.zeros_like(gradient))
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        return gradient / (square / (1 - beta2**step)).sqrt_().add_(group["eps"])

    def beta(self, group: dict[str, Any]) -> float:
        return group["betas"][0]
