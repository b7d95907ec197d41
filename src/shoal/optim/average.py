"""Averages of weights beside them, under which a run is evaluated, and Lookahead; for every optimizer.

    EMA         a <- d a + (1 - d) x,     from the first update's weights on
    SWA         a <- a + (x - a) / n      at the n-th update that counts            (Izmailov et al., arXiv:1803.05407)
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

from shoal.optim.average_config import EMA, AverageConfig, Lookahead

AVERAGE, SLOW = "average", "slow_weight"


def keep_average(optimizer: torch.optim.Optimizer, config: AverageConfig) -> None:
    """From now on every step moves the average of what it has updated."""

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _stepped(optimizer):
            _move(optimizer.state[parameter], parameter, config)

    optimizer.register_step_post_hook(after)


def _move(state: dict[str, Any], parameter: Parameter, config: AverageConfig) -> None:
    if AVERAGE not in state:
        state[AVERAGE] = parameter.detach().clone()
    average = state[AVERAGE]
    if isinstance(config, EMA):
        average.lerp_(parameter, 1 - config.decay)
        return
    count = state.setdefault("averaged", torch.zeros((), dtype=torch.float64, device=parameter.device))
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
