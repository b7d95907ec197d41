"""Cutting a chain of parts into stages: contiguous runs, one after the other, none empty.

The slowest stage sets the pace of a pipeline, so the automatic cut minimises the largest stage,

    min over cuts of  max_s  sum of the costs of the parts in s,

exactly (greedy filling decides whether a limit can be kept; bisection finds the smallest that can), and of the cuts
that keep this limit takes the most even one, min sum_s cost(s)^2, by dynamic programming.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.errors import LayoutError

Cut = tuple[range, ...]
"""For each stage, the indices of its parts."""

_ROUNDING = 1e-12
"""Relative slack of a limit: sums of the same costs differ by rounding with the order of summation."""


def balanced_cut(costs: Sequence[float], stages: int) -> Cut:
    """The cut of parts of these `costs` (of any unit, none negative) whose largest stage is smallest.

    Raises `LayoutError` where there are fewer parts than stages.
    """
    check_enough_blocks(len(costs), stages)
    limit = _smallest_limit(costs, stages) * (1 + _ROUNDING)
    ends = _most_even(costs, stages, limit)
    return tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def check_enough_blocks(parts: int, stages: int) -> None:
    """Raises `LayoutError` where there are fewer parts than stages."""
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
