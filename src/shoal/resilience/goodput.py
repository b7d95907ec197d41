"""How often a run should save: pure functions of the failures so far, and of what a step and a save take.

`mean_between_failures_s` starts from what was expected and moves to what is seen, as the mean of a gamma distribution
does; `cost.interval` has Young's and Daly's formulas.
"""

from __future__ import annotations

from shoal.cost.interval import daly_s, young_s


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
