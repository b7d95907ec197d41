"""What is drawn from a series of measurements: smooth curves, medians, fewer points. Pure.

Values that are NaN are steps that were skipped: they count in nothing, and leave a gap where a curve is drawn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


def finite(values: Iterable[float]) -> list[float]:
    """The values that are numbers."""
    return [value for value in values if math.isfinite(value)]


def median(values: Iterable[float]) -> float | None:
    """The median of the finite values, None where there is none."""
    numbers = finite(values)
    return statistics.median(numbers) if numbers else None


def mean(values: Iterable[float]) -> float | None:
    """The mean of the finite values, None where there is none."""
    numbers = finite(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def smooth(values: Sequence[float], *, half_life: float) -> list[float]:
    """The exponential moving average with the bias correction of Adam (Kingma and Ba, 2015, section 3):

        y_t = sum_{s <= t} d^(t-s) x_s / sum_{s <= t} d^(t-s),    d = 2^(-1 / half_life)

    It is causal: a value says nothing about steps after its own, so the curve of a run that goes on never changes.
    `half_life` is in values. What is not finite counts in nothing and is NaN in the curve, which leaves a gap.
    """
    decay = 0.5 ** (1.0 / half_life)
    total, weight = 0.0, 0.0
    curve: list[float] = []
    for value in values:
        is_number = math.isfinite(value)
        total = decay * total + (value if is_number else 0.0)
        weight = decay * weight + is_number
        curve.append(total / weight if is_number else math.nan)
    return curve


def thin(xs: Sequence[float], ys: Sequence[float], *, limit: int) -> list[tuple[float, float]]:
    """At most `limit` points that look like all of them: of each run of neighbours, the lowest and the highest."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    if len(points) <= limit:
        return points
    buckets = max(1, limit // 2)
    kept: list[tuple[float, float]] = []
    for index in range(buckets):
        bucket = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        extremes = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept.extend(sorted(extremes))
    return kept
