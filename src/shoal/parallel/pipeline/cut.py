"""What each part of a chain costs: from its parameters, or by the clock.

Cutting a chain of parts into stages: contiguous runs, one after the other, none empty.

The slowest stage sets the pace of a pipeline, so the automatic cut minimises the largest stage,

    min over cuts of  max_s  sum of the costs of the parts in s,

exactly (greedy filling decides whether a limit can be kept; bisection finds the smallest that can), and of the cuts
that keep this limit takes the most even one, min sum_s cost(s)^2, by dynamic programming.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import LayoutError
from shoal.models.roles import DeclaresParts, Part, role_of

LEAST_SHARE = 1e-3
"""A part without matrix products is not free: this share of the dearest part's cost."""


def estimated_costs(model: nn.Module, parts: Sequence[Part]) -> list[float]:
    """Multiplications a token: the numbers of each part's matrices, those of an embedding, which is looked up, left
    out. The same on every rank, with or without storage."""
    costs = [float(sum(_products(model, name) for name in part.modules)) for part in parts]
    return [max(cost, LEAST_SHARE * max(costs)) for cost in costs]


def _products(model: nn.Module, module: str) -> int:
    named = model.get_submodule(module).named_parameters(prefix=module)
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


Cut = tuple[range, ...]
"""For each stage, the indices of its parts."""

_ROUNDING = 1e-12
"""Relative slack of a limit: sums of the same costs differ by rounding with the order of summation."""


def balanced_cut(costs: Sequence[float], stages: int) -> Cut:
    """The cut of parts of these `costs` (of any unit, none negative) whose largest stage is smallest.

    Raises `LayoutError` where there are fewer parts than stages.
    """
    _check_enough(len(costs), stages)
    limit = _smallest_limit(costs, stages) * (1 + _ROUNDING)
    ends = _most_even(costs, stages, limit)
    return tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def cut_at(names: Sequence[str], firsts: Sequence[str], *, stages: int) -> Cut:
    """The cut by hand: `firsts` are the names of the first part of each stage but the first one.

    Raises `LayoutError` for a name that no part has, for names out of order, and where their number does not fit.
    """
    _check_enough(len(names), stages)
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


def _check_enough(parts: int, stages: int) -> None:
    if parts < stages:
        raise LayoutError(
            f"{stages} pipeline stages for a model of {parts} parts: every stage needs a part; use at most {parts} "
            f"stages (layout.pipeline x pipeline.stages_per_rank)"
        )


def _smallest_limit(costs: Sequence[float], stages: int) -> float:
    low, high = max(costs), math.fsum(costs)
    if _fewest_stages(costs, low) <= stages:
        return low
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if _fewest_stages(costs, middle) <= stages else (middle, high)
    return high


def _fewest_stages(costs: Sequence[float], limit: float) -> int:
    stages, filled = 1, 0.0
    for cost in costs:
        if filled + cost > limit:
            stages, filled = stages + 1, 0.0
        filled += cost
    return stages


def _most_even(costs: Sequence[float], stages: int, limit: float) -> list[int]:
    """Where each stage ends."""
    parts = len(costs)
    best = [[math.inf] * (parts + 1) for _ in range(stages + 1)]
    start_of = [[0] * (parts + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, parts - (stages - stage) + 1):
            cost = 0.0
            for start in range(end - 1, stage - 2, -1):
                cost += costs[start]
                if cost > limit:
                    break
                if best[stage - 1][start] + cost * cost < best[stage][end]:
                    best[stage][end], start_of[stage][end] = best[stage - 1][start] + cost * cost, start
    ends = [parts]
    for stage in range(stages, 1, -1):
        ends.insert(0, start_of[stage][ends[0]])
    return ends
