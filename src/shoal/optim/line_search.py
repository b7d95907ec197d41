"""A line search for the strong Wolfe conditions: how far to go along a direction in which the loss falls.

Nocedal and Wright, Numerical Optimization (2006), algorithms 3.5 and 3.6. With phi(a) the loss at x + a d, a step a is
taken if

    phi(a) <= phi(0) + c1 a phi'(0)     and     |phi'(a)| <= c2 |phi'(0)|

A step to where either is not finite is none to take: shorter ones are tried.

Near a minimum the first cannot be told any more: the loss changes by less than its last bits. There, where phi(a) is
phi(0) but for rounding, it is asked of the slope instead (Hager and Zhang, SIAM J. Optim. 16, 2005, equation 4.1):

    phi'(a) <= (2 c1 - 1) phi'(0)

Pure: ranks that are given the same numbers take the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Phi = Callable[[float], tuple[float, float]]
"""From the length of a step to the loss there and its slope along the direction."""

_FARTHER = 4.0
"""By how much a step grows that was too short."""
_MARGIN = 0.1
"""Interpolated steps stay this share of an interval away from its ends."""


@dataclass(frozen=True)
class Wolfe:
    """Both constants; `rounding`: differences of the loss that say nothing, relative; `evaluations`: the most."""

    decrease: float = 1e-4
    curvature: float = 0.9
    rounding: float = 0.0
    evaluations: int = 25


@dataclass(frozen=True)
class Trial:
    """A step that was tried: its length, the loss there, the slope there."""

    length: float
    value: float
    slope: float


def search(phi: Phi, start: Trial, first: float, wolfe: Wolfe) -> Trial:
    """The step to take, `first` being tried before others; one of length 0 where none was better than `start`.

    `start` is the trial of length 0, whose slope is below 0. Where `wolfe.evaluations` end the search, the best step so
    far that decreases the loss enough is taken.
    """
    return _Search(phi, start, wolfe).run(first)


class _Search:
    def __init__(self, phi: Phi, start: Trial, wolfe: Wolfe) -> None:
        self._phi, self._start, self._wolfe = phi, start, wolfe
        self._left = wolfe.evaluations
        self._best = start

    def run(self, first: float) -> Trial:
        """Algorithm 3.5: longer and longer steps, until an interval is known to hold a good one."""
        before, length = self._start, first
        while self._left:
            trial = self._at(length)
            if not self._decreases(trial) or (before.length > 0 and trial.value > self._rounded(before.value)):
                return self._between(before, trial)
            if self._flat(trial):
                return trial
            if trial.slope >= 0:
                return self._between(trial, before)
            before, length = trial, _FARTHER * length
        return self._best

    def _between(self, low: Trial, high: Trial) -> Trial:
        """Algorithm 3.6: `low` is the better end of an interval, whose slope points to the other one."""
        while self._left and low.length != high.length:
            trial = self._at(_interpolated(low, high))
            if not self._decreases(trial) or trial.value > self._rounded(low.value):
                high = trial
            elif self._flat(trial):
                return trial
            else:
                if trial.slope * (high.length - low.length) >= 0:
                    high = low
                low = trial
        return self._best

    def _at(self, length: float) -> Trial:
        self._left -= 1
        trial = Trial(length, *self._phi(length))
        if self._decreases(trial) and trial.value <= self._best.value:
            self._best = trial
        return trial

    def _decreases(self, trial: Trial) -> bool:
        start, decrease = self._start, self._wolfe.decrease
        if not _finite(trial):
            return False
        if trial.value <= start.value + decrease * trial.length * start.slope:
            return True
        same = abs(trial.value - start.value) <= self._wolfe.rounding * abs(start.value)
        return same and trial.slope <= (2 * decrease - 1) * start.slope

    def _flat(self, trial: Trial) -> bool:
        return abs(trial.slope) <= self._wolfe.curvature * abs(self._start.slope)

    def _rounded(self, value: float) -> float:
        return value + self._wolfe.rounding * abs(value)


def _interpolated(low: Trial, high: Trial) -> float:
    """The minimum of the cubic through both values and slopes (equation 3.59), or the middle where there is none."""
    width = high.length - low.length
    middle, margin = low.length + width / 2, _MARGIN * abs(width)
    if not (_finite(low) and _finite(high)):
        return middle
    d1 = low.slope + high.slope - 3 * (low.value - high.value) / (low.length - high.length)
    square = d1 * d1 - low.slope * high.slope
    if not 0 <= square < math.inf:  # where it overflows, too
        return middle
    d2 = math.copysign(math.sqrt(square), width)
    denominator = high.slope - low.slope + 2 * d2
    found = high.length - width * (high.slope + d2 - d1) / denominator if denominator else middle
    if not math.isfinite(found):
        return middle
    nearest, farthest = sorted((low.length, high.length))
    return min(max(found, nearest + margin), farthest - margin)


def _finite(trial: Trial) -> bool:
    return math.isfinite(trial.value) and math.isfinite(trial.slope)
