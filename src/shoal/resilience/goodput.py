"""Where the time of a run went, and how often it should save: pure functions of what happened and when.

    effective = 1 - (detecting + restarting + redone + stalled) / total

*Detecting* lasts from a failure to its notice, *restarting* from there to the next step, *redone* are steps whose
result was lost and that were taken again, *stalled* is what training stood still for saves. What is left is training.

The interval between saves follows from the failures so far: `mean_between_failures_s` starts from what was expected and
moves to what is seen, as the mean of a gamma distribution does; `cost.interval` has Young's and Daly's formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.cost.interval import daly_s, young_s


@dataclass(frozen=True)
class StepTaken:
    """Attempts of one step have the same number; only the last attempt counts."""

    step: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Failure:
    """From when something failed, was noticed, and the next step began."""

    failed_s: float
    noticed_s: float
    resumed_s: float

    def __post_init__(self) -> None:
        if not self.failed_s <= self.noticed_s <= self.resumed_s:
            raise ValueError(
                f"a failure at {self.failed_s} s, noticed at {self.noticed_s} s and over at {self.resumed_s} s: "
                "these follow each other; record them with one clock"
            )


@dataclass(frozen=True)
class Goodput:
    """Seconds, all of one run."""

    total_s: float
    detecting_s: float
    restarting_s: float
    redone_s: float
    stalled_s: float

    @property
    def effective(self) -> float:
        """The share of the time that became the state that the run has now."""
        lost_s = self.detecting_s + self.restarting_s + self.redone_s + self.stalled_s
        return max(0.0, 1 - lost_s / self.total_s) if self.total_s > 0 else 0.0


def goodput(
    steps: Sequence[StepTaken], failures: Sequence[Failure], stalls_s: Iterable[float], *, total_s: float
) -> Goodput:
    """Adds up what happened in `total_s` seconds. `steps` are in the order in which they were taken; a step that is
    taken again makes its earlier attempt, and all between, redone."""
    redone_s, kept = 0.0, list[StepTaken]()
    for taken in steps:
        while kept and kept[-1].step >= taken.step:
            lost = kept.pop()
            redone_s += lost.stop_s - lost.start_s
        kept.append(taken)
    return Goodput(
        total_s,
        sum(failure.noticed_s - failure.failed_s for failure in failures),
        sum(failure.resumed_s - failure.noticed_s for failure in failures),
        redone_s,
        sum(stalls_s),
    )


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
