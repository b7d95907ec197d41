"""One constant from one measured step: the value at which the prediction is the measurement.

Step time falls with `compute` and rises with `dispatch_s`, so a bisection finds the value, or the end of the range
where the measurement lies beyond it: a machine cannot be calibrated to more than its data sheet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.planner.predict.constants import Constants

COMPUTE_RANGE = (0.2, 1.25)
DISPATCH_RANGE = (0.0, 1e-3)
FACTOR_RANGE = (0.25, 4.0)
STEPS = 60


def calibrate_compute(predicted_s: Callable[[Constants], float], measured_s: float, start: Constants) -> Constants:
    """`start` with the factor on the matrix-multiply rate that gives `measured_s`."""
    value = _bisect(lambda x: -predicted_s(replace(start, compute=x)), -measured_s, COMPUTE_RANGE)
    return replace(start, compute=value)


def calibrate_dispatch(predicted_s: Callable[[Constants], float], measured_s: float, start: Constants) -> Constants:
    """`start` with the host's seconds of one operator that give `measured_s`."""
    value = _bisect(lambda x: predicted_s(replace(start, dispatch_s=x)), measured_s, DISPATCH_RANGE)
    return replace(start, dispatch_s=value)


def calibrate_factor(predicted_s: Callable[[float], float], measured_s: float) -> float:
    """The factor on all measured operators that gives `measured_s`: what a whole step does to caches and memory."""
    return _bisect(predicted_s, measured_s, FACTOR_RANGE)


def _bisect(rising: Callable[[float], float], wanted: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    for _ in range(STEPS):
        middle = (low + high) / 2
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
