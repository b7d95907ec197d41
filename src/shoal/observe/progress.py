"""Where a run stands, as one or two lines of text: what every display shows.

The training loop only stores references here (about a microsecond a step); text is made when somebody looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from shoal.observe import figures

SLOW_DATA_SHARE = 0.01
"""Waiting for data is mentioned above this share of the step."""


class Progress:
    """The latest values of a run, its pace and the time that is left."""

    def __init__(
        self, title: str, total_steps: int, *, first_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`first_step` is the number of the first step that this life does (1 in a fresh run)."""
        self.title = title
        self.total_steps = total_steps
        self.step = first_step - 1
        self.values: Mapping[str, float] = {}
        self.held_out: dict[str, float] = {}
        self._clock = clock
        self._start_step = self.step
        self._start_s = clock()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Stores a step. An evaluation alone (`loss/eval` without `loss/train`) leaves the other values standing."""
        self.step = step
        for name in ("loss/eval", "accuracy/eval"):
            if name in values:
                self.held_out[name] = values[name]
        if "loss/train" in values or "loss/eval" not in values:
            self.values = values

    @property
    def share(self) -> float:
        """The share of the run that is done, from 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps > 0 else 0.0

    def left_s(self) -> float | None:
        """Seconds to the last step at the mean pace of this life, None before its second step."""
        done = self.step - self._start_step
        if done < 2:
            return None
        return (self._clock() - self._start_s) / done * max(0, self.total_steps - self.step)

    def position(self) -> str:
        """Step, total and the time left."""
        if self.step == self._start_step:
            return "starting"
        left_s = self.left_s()
        left = "" if left_s is None or self.step >= self.total_steps else f"  {figures.duration(max(1.0, left_s))} left"
        return f"step {self.step}/{self.total_steps}{left}"

    def measurements(self) -> list[str]:
        """The figures that matter now, the most important first."""
        values = self.values
        parts = [f"{label} {form(source[name])}" for label, name, source, form in self._table() if name in source]
        for name, unit in (("tokens", "tokens/s"), ("samples", "samples/s")):
            if (pace := values.get(f"throughput/{name}_per_second")) is not None:
                parts.append(f"{figures.count(pace)} {unit}")
                break
        return parts + self._waiting()

    def line(self) -> str:
        """All of it in one line, for a log or a pipe."""
        return "  ".join([self.position(), *self.measurements()])

    def _table(self) -> list[tuple[str, str, Mapping[str, float], Callable[[float], str]]]:
        return [
            ("loss", "loss/train", self.values, figures.loss),
            ("held out", "loss/eval", self.held_out, figures.loss),
            ("accuracy", "accuracy/eval", self.held_out, figures.percent),
            ("lr", "lr", self.values, "{:.2e}".format),
        ]

    def _waiting(self) -> list[str]:
        step_s = self.values.get("time/step", 0.0)
        if step_s <= 0:
            return []
        parts = []
        if (sync_s := self.values.get("time/sync_exposed")) is not None:
            parts.append(f"sync {figures.percent(sync_s / step_s)}")
        if (data_s := self.values.get("time/data", 0.0)) > SLOW_DATA_SHARE * step_s:
            parts.append(f"data wait {figures.percent(data_s / step_s)}")
        return parts
