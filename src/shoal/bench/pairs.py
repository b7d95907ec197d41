"""The statistics of paired measurements: two ways of doing one thing, in turn, many times, on a noisy machine.

The ratio within each pair is compared, so that a slow minute slows both sides. The bound of its median assumes no
distribution. The number of pairs above the median is binomial, so that the k-th smallest ratio with

    k = n/2 - 1.645 sqrt(n)/2

lies below the median with 95 % confidence (the one-sided bound of the sign test). An A/A measurement, of two sides that
do the same, shows how far noise alone moves a ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

ONE_SIDED_95 = 1.645

Turns = list[dict[str, float]]
"""Seconds of a step by side, turn by turn."""


def ratios(turns: Turns, side: str, *, peer: str) -> list[float]:
    """How many times as fast as `peer` the `side` was, in each turn that has both."""
    return [turn[peer] / turn[side] for turn in turns if side in turn and peer in turn]


def lower_bound(values: Sequence[float]) -> float:
    """The 95 % lower bound of the median of `values`."""
    ordered = sorted(values)
    index = math.floor(len(ordered) / 2 - ONE_SIDED_95 * math.sqrt(len(ordered)) / 2)
    return ordered[max(0, index - 1)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 5th and the 95th percentile."""
    ordered = sorted(values)
    return ordered[int(0.05 * (len(ordered) - 1))], ordered[math.ceil(0.95 * (len(ordered) - 1))]


def columns(turns: Turns) -> dict[str, list[float]]:
    """Seconds by side, of the turns that have the side."""
    sides = dict.fromkeys(side for turn in turns for side in turn)
    return {side: [turn[side] for turn in turns if side in turn] for side in sides}


def milliseconds(times_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each column, ms, as cells of a row."""
    return {f"{name}_ms": round(1e3 * statistics.median(values), 2) for name, values in times_s.items() if values}


def again_cells(values: Sequence[float]) -> dict[str, object]:
    """The ratios of an A/A measurement as cells of a row: median and spread."""
    return {
        "aa_median": round(statistics.median(values), 4),
        "aa_spread": [round(value, 4) for value in spread(values)],
    }
