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
    """An exponential average that looks both ways, so that the curve does not lag behind a loss that falls.

        y_t = sum_s d^|t-s| x_s / sum_s d^|t-s|,    d = 2^(-1 / half_life)

    The division corrects for the ends, as in Adam (Kingma and Ba, 2015, section 3): the last value is exactly the
    bias-corrected moving average of all before it. `half_life` is in values. NaN where there is no finite value.
    """
    decay = 0.5 ** (1.0 / half_life)
    before = _decayed_sums(values, decay)
    after = _decayed_sums(values[::-1], decay)[::-1]
    curve: list[float] = []
    for value, (past, past_weight), (future, future_weight) in zip(values, before, after, strict=True):
        own, own_weight = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)  # it is in both sums
        weight = past_weight + future_weight - own_weight
        curve.append((past + future - own) / weight if weight > 0 else math.nan)
    return curve


def _decayed_sums(values: Sequence[float], decay: float) -> list[tuple[float, float]]:
    """For each value, the decayed sum of the finite ones up to it, and the sum of their weights."""
    total, weight = 0.0, 0.0
    sums: list[tuple[float, float]] = []
    for value in values:
        is_number = math.isfinite(value)
        total = decay * total + (value if is_number else 0.0)
        weight = decay * weight + is_number
        sums.append((total, weight))
    return sums


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
