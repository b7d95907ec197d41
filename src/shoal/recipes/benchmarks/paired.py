"""Paired measurements: two ways of doing the same thing, one after the other, many times, on a noisy machine. Pure.

What is compared is the ratio within each pair, so that a slow minute slows both sides. Its median is bounded without
assuming a distribution: the number of pairs above the median is binomial, so the k-th smallest ratio with
k = n/2 - 1.645 * sqrt(n)/2 lies below the median with 95 % confidence (the sign test's one-sided bound).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

ONE_SIDED_95 = 1.645


def lower_bound(values: Sequence[float]) -> float:
    """The 95 % lower bound of the median of `values`."""
    ordered = sorted(values)
    index = math.floor(len(ordered) / 2 - ONE_SIDED_95 * math.sqrt(len(ordered)) / 2)
    return ordered[max(0, index - 1)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 5th and the 95th percentile."""
    ordered = sorted(values)
    return ordered[int(0.05 * (len(ordered) - 1))], ordered[math.ceil(0.95 * (len(ordered) - 1))]


def check(name: str, value: float, bound: float, *, at_most: bool = False) -> dict[str, Any]:
    """A promised figure, in the form of a benchmark's `checks`."""
    holds = value <= bound if at_most else value >= bound
    return {"name": name, "value": round(value, 4), "bound": bound, "holds": holds}


def milliseconds(times_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each column."""
    return {f"{name}_ms": round(1e3 * statistics.median(values), 2) for name, values in times_s.items() if values}
