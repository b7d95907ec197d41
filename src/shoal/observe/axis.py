"""The axis of a chart: its range, where a value lies on it, and its ticks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOG_RATIO = 12.0
"""Values whose bulk spans more than this ratio are drawn on a logarithmic axis, where the chart allows it."""

LARGEST = 1e150
"""Larger values are not drawn: the arithmetic of an axis would overflow."""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`; values outside are moved to the nearer end."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values on the axis."""
        if self.log and self.high / self.low >= 10:
            return _log_ticks(self.low, self.high, count)
        return _linear_ticks(self.low, self.high, count)


def drawable(values: Iterable[float]) -> list[float]:
    """The values that can be drawn."""
    return [value for value in values if abs(value) <= LARGEST]


def axis_for(values: Sequence[float], *, from_zero: bool = False, may_be_log: bool = False) -> Axis:
    """An axis that holds all values with some air; one around a single value; 0 to 1 for none."""
    numbers = sorted(drawable(values))
    if not numbers:
        return Axis(0.0, 1.0)
    low, high = numbers[0], numbers[-1]
    if may_be_log and wants_log(numbers):
        air = (high / low) ** 0.04
        return Axis(low / air, high * air, log=True)
    if from_zero:
        low = min(0.0, low)
    air = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return Axis(low if low == 0 and from_zero else low - air, high + air)


def wants_log(ordered: Sequence[float]) -> bool:
    """Do ascending values, the outermost fiftieth left out, span so much that a linear axis hides the small ones?"""
    if not ordered or ordered[0] <= 1e-150:
        return False
    edge = len(ordered) // 50
    return ordered[-1 - edge] / ordered[edge] > LOG_RATIO


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    step = _round_step((high - low) / max(1, count))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, min(last, first + 4 * count) + 1)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= step * 0.7)


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / count))
    powers = [10.0**power for power in range(first, last + 1, stride)]
    if len(powers) >= 3:
        return powers
    between = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5))
    return [value for value in between if low <= value <= high]
