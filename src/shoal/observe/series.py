"""What is drawn from a series of measurements: smooth curves, medians, rates, fewer points. Pure.

Values that are NaN are steps that were skipped: they count in nothing, and leave a gap where a curve is drawn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise


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
    """The exponential moving average, corrected for its start (Kingma and Ba, 2015, section 3).

        m_t = d m_{t-1} + (1 - d) x_t,    result_t = m_t / (1 - d^t),    d = 2^(-1 / half_life)

    `half_life` is in values. A value that is not finite repeats the average so far (NaN before the first).
    """
    decay = 0.5 ** (1.0 / half_life)
    average, weight = 0.0, 0.0
    curve: list[float] = []
    for value in values:
        if math.isfinite(value):
            average = decay * average + (1.0 - decay) * value
            weight = decay * weight + (1.0 - decay)
        curve.append(average / weight if weight else math.nan)
    return curve


def rates(totals: Sequence[float], times_s: Sequence[float]) -> list[float]:
    """Growth per second between neighbours, one value fewer than `totals`; NaN where no time passed."""
    spans = pairwise(zip(totals, times_s, strict=True))
    return [(total - before) / (end - start) if end > start else math.nan for (before, start), (total, end) in spans]


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
