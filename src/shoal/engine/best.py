"""What evaluations have found so far: which step is the best one, and whether it is time to stop.

All ranks measure the same values, so all decide alike, without a message. What is kept here is in every checkpoint: a
run that resumes decides as if it had never been interrupted, in any layout. An evaluation that a stop came before is
made up for when the run resumes (`missed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint.config import Goal
from shoal.engine.config import StopWhen
from shoal.errors import ConfigError


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
