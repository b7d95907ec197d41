"""When to save and when to stop: the best step so far, patience, and how often a checkpoint pays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.checkpoint.config import Goal
from shoal.checkpoint.save import SaveReport
from shoal.cost.interval import mean_between_failures_s, steps_between_saves
from shoal.engine.config import StopWhen
from shoal.errors import ConfigError

# What evaluations have found so far: which step is the best one, and whether it is time to stop.
#
# All ranks measure the same values, so all decide alike, without a message. What is kept here is in every checkpoint: a
# run that resumes decides as if it had never been interrupted, in any layout. An evaluation that a stop came before is
# made up for when the run resumes (`missed`).


@dataclass
class Best:
    """The best value of a goal, of the evaluation after `step`; `since` evaluations have not been better by more than
    `least_change`. None: there was none.
    """

    goal: Goal
    least_change: float = 0.0
    value: float | None = None
    step: int = 0
    since: int = 0

    def note(self, step: int, value: float) -> bool:
        """Whether `value` is the best so far."""
        better = self.goal.is_better(value, self.value, by=self.least_change)
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def to_state(self) -> dict[str, Any]:
        """As it is in a checkpoint."""
        goal = {"measurement": self.goal.measurement, "goal": self.goal.goal}
        return {**goal, "value": self.value, "step": self.step, "since": self.since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, unless that was the best by another goal."""
        if (state["measurement"], state["goal"]) == (self.goal.measurement, self.goal.goal):
            value = state["value"]
            self.value = None if value is None else float(value)
            self.step, self.since = int(state["step"]), int(state["since"])


class Watch:
    """Evaluations, as `checkpoint.keep_best` and `run.stop_when` look at them; None: nobody asks."""

    def __init__(self, keep: Goal | None = None, stop: StopWhen | None = None) -> None:
        self.evaluated = 0
        self.best = None if keep is None else Best(keep)
        self._stop = stop
        self._improved = None if stop is None else Best(stop, stop.least_change)

    @property
    def active(self) -> bool:
        """Whether anybody asks."""
        return self.best is not None or self._improved is not None

    @property
    def over(self) -> str | None:
        """Why the run ends before its last step, None where it does not."""
        found, stop = self._improved, self._stop
        if found is None or stop is None or found.since < stop.patience:
            return None
        best = "it was never a number" if found.value is None else f"the best is {found.value:.6g} of step {found.step}"
        return (
            f"stopped early after step {self.evaluated}: {stop.measurement} has not improved in {found.since} "
            f"evaluations ({best}); raise run.stop_when.patience to go on"
        )

    def require_evaluations(self, *, held_out: bool, own_loop: bool) -> None:
        """Raises `ConfigError` where somebody asks, and there is nothing to compare."""
        if self.active and own_loop:
            raise ConfigError(
                "run.stop_when and checkpoint.keep_best compare the evaluations of shoal.train, and this loop is the "
                "script's own: leave the keys out; break ends the loop, and run.save() saves where a step is the best"
            )
        if self.active and not held_out:
            raise ConfigError(
                "run.stop_when and checkpoint.keep_best compare evaluations, and there is no held-out data: add some, "
                "or leave the keys out"
            )

    def missed(self, step: int, *, due: bool) -> bool:
        """Whether an evaluation was `due` after `step`, the newest, and has not been made."""
        return self.active and due and self.evaluated < step

    def note(self, step: int, measured: Mapping[str, float]) -> bool:
        """Whether the weights of `step` are the best so far. Raises `ConfigError` for what was not measured."""
        self.evaluated = step
        new_best = self.best is not None and self.best.note(step, _value(self.best, measured, "checkpoint.keep_best"))
        if self._improved is not None:
            self._improved.note(step, _value(self._improved, measured, "run.stop_when"))
        return new_best

    def to_state(self) -> dict[str, Any]:
        """As it is in a checkpoint; nothing where nobody asks."""
        found = {"best": self.best, "improved": self._improved}
        states = {name: one.to_state() for name, one in found.items() if one is not None}
        return {"evaluated": self.evaluated, **states} if states else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.evaluated = int(state["evaluated"])
        for name, one in (("best", self.best), ("improved", self._improved)):
            if one is not None and name in state:
                one.load(state[name])


def _value(best: Best, measured: Mapping[str, float], key: str) -> float:
    name = best.goal.measurement
    if name not in measured:
        there = ", ".join(measured) or "nothing"
        raise ConfigError(
            f"{key}.measurement = {name!r} is not what an evaluation measures, which is {there}: name one of these"
        )
    return measured[name]


# When the next checkpoint is due: every so many steps, or by Daly's formula from what steps, saves and failures took.
#
#     tau = sqrt(2 d M) - d        d: seconds that a save holds training up, M: mean seconds between failures
#
# (Young, CACM 17, 1974; Daly, FGCS 22, 2006.) M begins as it was expected and moves to what the run has seen
# (`cost.interval`). The interval is found anew after every save, by the first rank, and told to the others, since
# all must save in the same step. It is never shorter than a save takes behind training: the next one would wait for it.


Announce = Callable[[str, Callable[[], str]], str]
"""`announce(key, find)`: the first rank calls `find`; every rank gets its answer."""


class SaveInterval(Protocol):
    """Which steps are followed by a save."""

    def due(self, step: int) -> bool:
        """Whether step `step` is followed by a save; asked once after every step."""
        ...

    def saved(self, step: int, *, stall_s: float) -> None:
        """A save after `step` has begun, and held training up for `stall_s`."""
        ...

    def wrote(self, seconds: float) -> None:
        """A save took so long, from its call to its verdict."""
        ...


@dataclass
class LastSave:
    """The newest save of this start: how far it was from the one before it, or from the start, which are measurements
    of the step that follows it; what it wrote, of the first step that ends after it.
    """

    step: int | None = None
    clock: Callable[[], float] = time.monotonic
    _time_s: float = 0.0
    _figures: dict[str, float] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Training starts, or goes on, after `step`."""
        self.step, self._time_s = step, self.clock()

    def saved(self, step: int) -> None:
        """A save after `step` has begun."""
        now_s = self.clock()
        if self.step is not None:
            steps, seconds = step - self.step, now_s - self._time_s
            self._figures |= {"checkpoint/interval_steps": steps, "checkpoint/interval_s": seconds}
        self.step, self._time_s = step, now_s

    def wrote(self, report: SaveReport) -> None:
        """A save has ended, and the checkpoint counts."""
        self._figures |= {
            "checkpoint/saved_step": report.step,
            "checkpoint/save_s": report.seconds,
            "checkpoint/state_bytes": report.state_bytes,
            "checkpoint/written_bytes": report.bytes_written,
            "checkpoint/reused_bytes": report.bytes_reused,
        }

    def take_figures(self) -> dict[str, float]:
        """What was found since the last call; {} without a save."""
        figures, self._figures = self._figures, {}
        return figures


@dataclass(frozen=True)
class EverySteps:
    """At every multiple of `steps`; 0: never."""

    steps: int

    def due(self, step: int) -> bool:
        return self.steps > 0 and step % self.steps == 0

    def saved(self, step: int, *, stall_s: float) -> None:
        pass

    def wrote(self, seconds: float) -> None:
        pass


@dataclass
class ByFailures:
    """`first`: steps from the last save, that of `saved_step` (None: of `step`), to the next. Times count from `step`.
    `failures` were seen in `running_s` seconds before this start; `expected_s`: mean seconds between failures that were
    expected. `tell` hears of every new interval, in a sentence and in steps.
    """

    first: int
    step: int
    announce: Announce
    failures: int
    running_s: float
    expected_s: float
    tell: Callable[[str, int], None]
    saved_step: int | None = None
    clock: Callable[[], float] = time.monotonic
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self.first
        self._last_step, self._last_s = self.step, self.clock()
        self._saved_step = self.step if self.saved_step is None else self.saved_step
        self._began_s, self._save_s = self._last_s, 0.0

    def due(self, step: int) -> bool:
        return step >= self._saved_step + self.steps

    def wrote(self, seconds: float) -> None:
        self._save_s = seconds

    def saved(self, step: int, *, stall_s: float) -> None:
        now_s = self.clock()
        taken, passed_s = step - self._last_step, now_s - self._last_s
        self._last_step, self._last_s, self._saved_step = step, now_s, step
        before = self.steps
        self.steps = int(self.announce(f"save-interval/{step}", lambda: str(self._found(taken, passed_s, stall_s))))
        if self.steps != before:
            said = f"the next checkpoint is due after {self.steps} steps, by the time of steps, saves and failures"
            self.tell(said, self.steps)

    def _found(self, taken: int, passed_s: float, stall_s: float) -> int:
        if taken <= 0 or passed_s <= stall_s:
            return self.steps
        step_s = (passed_s - stall_s) / taken
        between_s = mean_between_failures_s(
            self.failures, self.running_s + self.clock() - self._began_s, expected_s=self.expected_s
        )
        found = steps_between_saves(step_s, stall_s, between_s)
        return max(found, math.ceil(self._save_s / step_s), 1)
