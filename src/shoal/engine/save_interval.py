"""When the next checkpoint is due: every so many steps, or by Daly's formula from what steps, saves and failures took.

    tau = sqrt(2 d M) - d        d: seconds that a save holds training up, M: mean seconds between failures

(Young, CACM 17, 1974; Daly, FGCS 22, 2006.) M begins as it was expected and moves to what the run has seen
(`cost.interval`). The interval is found anew after every save, by the first rank, and told to the others, since
all must save in the same step. It is never shorter than a save takes behind training: the next one would wait for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shoal.cost.interval import mean_between_failures_s, steps_between_saves

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
    """The newest save of this start, and how far it was from the one before it, or from the start: measurements of the
    step that follows it.
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
            self._figures = {"checkpoint/interval_steps": steps, "checkpoint/interval_s": seconds}
        self.step, self._time_s = step, now_s

    def take_figures(self) -> dict[str, float]:
        """Of a save since the last call; {} without one."""
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
