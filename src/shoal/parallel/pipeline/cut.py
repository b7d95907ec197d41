"""What each part of a chain costs, from its parameters or by the clock, and a cut by the names of its parts.

The automatic cut by costs is `schedules.cut.balanced_cut`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import LayoutError
from shoal.models.roles import DeclaresParts, Part, role_of
from shoal.schedules.cut import Cut, balanced_cut, check_enough

__all__ = ["Cut", "balanced_cut", "cut_at", "estimated_costs", "measured_costs", "stage_costs"]

LEAST_SHARE = 1e-3
"""A part without matrix products is not free: this share of the dearest part's cost."""


def estimated_costs(model: nn.Module, parts: Sequence[Part]) -> list[float]:
    """Multiplications a token: the numbers of each part's matrices, those of an embedding, which is looked up, left
    out. The same on every rank, with or without storage."""
    costs = [float(sum(_products(model, name) for name in part.modules)) for part in parts]
    return [max(cost, LEAST_SHARE * max(costs)) for cost in costs]


def _products(model: nn.Module, module: str) -> int:
    named = [
        (name, p) for name, p in model.named_parameters(remove_duplicate=False) if f"{name}.".startswith(f"{module}.")
    ]
    return sum(p.numel() for name, p in named if p.ndim >= 2 and role_of(model, name).kind != "embedding")


def measured_costs(
    model: DeclaresParts, *inputs: Any, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds of forward and backward of each part on `inputs`, on a device that is done when calls return.

    Leaves gradients in the parameters. Ranks measure differently: let one measure and tell the others.
    """
    context = model.context(*inputs)
    rounds = [_timed(model.parts(), context, clock) for _ in range(repeats + 1)]
    return [median(seconds) for seconds in zip(*rounds[1:], strict=True)]  # the first round warms up


def _timed(parts: Sequence[Part], context: Any, clock: Callable[[], float]) -> list[float]:
    seconds, x = [], None
    for part in parts:
        start_s = clock()
        output = part.run(x, context)
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))
        seconds.append(clock() - start_s)
        x = _leaf(output)
    return seconds


def _leaf(output: Tensor) -> Tensor:
    return output.detach().requires_grad_()


def cut_at(names: Sequence[str], firsts: Sequence[str], *, stages: int) -> Cut:
    """The cut by hand: `firsts` are the names of the first part of each stage but the first one.

    Raises `LayoutError` for a name that no part has, for names out of order, and where their number does not fit.
    """
    check_enough(len(names), stages)
    if len(firsts) != stages - 1:
        raise LayoutError(
            f"pipeline.cut names {len(firsts)} parts, but {stages} stages are cut at {stages - 1}; name the first part "
            f"of each stage but the first"
        )
    for name in firsts:
        if name not in names:
            raise LayoutError(f"pipeline.cut names {name!r}, which is no part of the model; it has {', '.join(names)}")
    starts = [0, *(names.index(name) for name in firsts)]
    if any(a >= b for a, b in pairwise(starts)):
        raise LayoutError(
            f"pipeline.cut = {list(firsts)} is not in the order of the model, {', '.join(names)}, or leaves a stage "
            f"empty; put the names in that order, without {names[0]!r}"
        )
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], len(names)], strict=True))


def stage_costs(costs: Sequence[float], cut: Cut) -> tuple[float, ...]:
    """The cost of each stage."""
    return tuple(sum(costs[part] for part in stage) for stage in cut)
