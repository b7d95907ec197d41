"""How often to save: seconds between checkpoints, and the share of time that is left for training.

d: seconds that a save holds the job up; M: mean seconds between failures; R: seconds from a failure to a new step.

    Young 1974              sqrt(2 d M)
    Daly 2006, first order  sqrt(2 d M) - d
    availability-optimal    d + sqrt(2 (M + R) d + d^2)        arXiv:2410.18124

With tau seconds of training between saves, a cycle of tau + d seconds loses on average half a cycle and R at every
failure. `effective_share` is the share of all time that becomes new steps; with failures at rate 1/M:

    tau / (tau + d) x M / (M + R + (tau + d)/2)

`steps_between_saves` is Daly's interval for a run that measures its steps and its saves. `mean_between_failures_s`
starts from what was expected and moves to what is seen, as the mean of a gamma distribution does.
"""

from __future__ import annotations

import math


def young_s(save_s: float, between_failures_s: float) -> float:
    """Young's interval."""
    return math.sqrt(2 * save_s * between_failures_s)


def daly_s(save_s: float, between_failures_s: float) -> float:
    """Daly's first-order interval; the mean time between failures where a save takes half of it or more."""
    if save_s >= between_failures_s / 2:
        return between_failures_s
    return math.sqrt(2 * save_s * between_failures_s) - save_s


def availability_optimal_s(save_s: float, between_failures_s: float, *, recovery_s: float) -> float:
    """The interval, from the start of one save to the start of the next, that leaves most time for training."""
    return save_s + math.sqrt(2 * (between_failures_s + recovery_s) * save_s + save_s**2)


def effective_share(interval_s: float, save_s: float, between_failures_s: float, *, recovery_s: float) -> float:
    """Share of wall time that becomes training. `interval_s` is the time from save to save, the save included."""
    if interval_s <= save_s:
        return 0.0
    working = (interval_s - save_s) / interval_s
    return working * between_failures_s / (between_failures_s + recovery_s + interval_s / 2)


def mean_between_failures_s(failures: int, running_s: float, *, expected_s: float) -> float:
    """The estimate after `failures` in `running_s` seconds, which begins as if one had been seen in `expected_s`."""
    return (expected_s + running_s) / (1 + failures)


def steps_between_saves(step_s: float, save_s: float, between_failures_s: float) -> int:
    """Daly's interval in whole steps, at least one; Young's where a save takes no time to speak of.

    Raises `ValueError` where a step takes no time.
    """
    if step_s <= 0:
        raise ValueError(f"a step of {step_s} s: measure one first")
    interval_s = daly_s(save_s, between_failures_s) if save_s > 0 else young_s(step_s / 100, between_failures_s)
    return max(1, round(interval_s / step_s))
