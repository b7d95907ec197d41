"""Where a run stands, as lines of text: what the displays show.

The training loop only stores references and adds a few numbers here (microseconds a step); text is made when somebody
looks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal import units
from shoal.observe.events import Event
from shoal.observe.goodput import Goodput
from shoal.observe.sink import Ending, RunStart

SLOW_DATA_SHARE = 0.01
"""Waiting for data is mentioned above this share of the step."""
BETWEEN = "  "
RECENT_STEPS = 20
PACES = ("throughput/tokens_per_second", "throughput/samples_per_second")
LEAST_BAR_CELLS, MOST_BAR_CELLS = 6, 28


@dataclass
class Totals:
    """Sums over the steps of this attempt."""

    steps: int = 0
    samples: float = 0.0
    tokens: float = 0.0
    step_s: float = 0.0
    exposed_s: float = 0.0

    def add(self, values: Mapping[str, float]) -> None:
        """One step; lines without `time/step`, such as evaluations, count in nothing."""
        step_s = values.get("time/step")
        if step_s is None:
            return
        self.steps += 1
        self.step_s += step_s
        self.samples += step_s * values.get("throughput/samples_per_second", 0.0)
        self.tokens += step_s * values.get("throughput/tokens_per_second", 0.0)
        self.exposed_s += values.get("time/sync_exposed", 0.0)


class Status:
    """The latest values of a run, its pace and the time that is left."""

    def __init__(
        self, run: RunStart, *, earlier: Goodput | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`earlier`: of the attempts before this one, if there were any; this one is added to it."""
        self.run = run
        self.step = run.first_step - 1
        self.values: Mapping[str, float] = {}
        self.held_out: dict[str, float] = {}
        self.critical_batch: float | None = None
        self.activity, self.membership = "", run.membership
        self.totals = Totals()
        self._recent: deque[Mapping[str, float]] = deque(maxlen=RECENT_STEPS)
        self.goodput = earlier or Goodput()
        if earlier is not None:  # as the events say it
            self.goodput.add(Event(run.first_step - 1, 0.0, run.generation), new_attempt=True)
        self._clock = clock
        self._start_s = clock()

    def update(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        """Stores a step that ended at the Unix time `time_s`. What an evaluation or a save recorded leaves the step and
        its values standing: a script's own loop tells of an evaluation before the step is over.
        """
        self.goodput.add(Event(step, time_s, self.run.generation, dict(values)), new_attempt=False)
        for name in ("loss/eval", "accuracy/eval"):
            if name in values:
                self.held_out[name] = values[name]
        if math.isfinite(noise := values.get("noise/scale", math.nan)):
            self.critical_batch = noise
        if values.keys() & {"loss/train", "time/step"}:
            self.step, self.values = step, values
            self.totals.add(values)
            if values.get("time/step", 1.0) > 0 and not values.keys().isdisjoint(PACES):
                self._recent.append(values)

    @property
    def share(self) -> float:
        """The share of the run that is done, from 0 to 1."""
        total = self.run.total_steps
        return min(1.0, self.step / total) if total > 0 else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of this attempt."""
        return self._clock() - self._start_s

    def left_s(self) -> float | None:
        """Seconds to the last step at the mean pace of this attempt, None before its second step, or without an end."""
        done = self.step - (self.run.first_step - 1)
        if done < 2 or self.run.open_end:
            return None
        return self.elapsed_s / done * max(0, self.run.total_steps - self.step)

    def position(self) -> list[str]:
        """Step and total, the time left (or what the run does instead of training), and the time elapsed."""
        left_s = self.left_s()
        more = [f"{units.clock(self.elapsed_s)} elapsed"]
        if self.activity:
            more.insert(0, self.activity)
        elif left_s is not None and self.step < self.run.total_steps:
            more.insert(0, f"{units.clock(max(1.0, left_s))} left")
        replicas = [self.membership] if self.membership else []
        of = "" if self.run.open_end else f"/{self.run.total_steps}"
        return [f"step {self.step}{of}", *more, *replicas]

    def measurements(self) -> list[str]:
        """The figures that matter now, the most important first."""
        values = self.values
        parts = [f"{label} {form(source[name])}" for label, name, source, form in self._table() if name in source]
        for name, unit in (("tokens", "tokens/s"), ("samples", "samples/s")):
            if f"throughput/{name}_per_second" in values:
                parts.append(f"{units.count(self._pace(name))} {unit}")
                break
        return [*parts, *self._mfu(), *self._epoch(), *self._waits(), *self._memory(), *self._rate(), *self._noise()]

    def _pace(self, name: str) -> float:
        """Of the last steps together: one step alone jumps with whatever else its host does."""
        paces = [(values.get("time/step", 1.0), values[f"throughput/{name}_per_second"]) for values in self._recent]
        return sum(step_s * pace for step_s, pace in paces) / sum(step_s for step_s, _ in paces)

    def line(self) -> str:
        """All of it in one line, for a log or a pipe."""
        return BETWEEN.join([*self.position(), *self.measurements()])

    def lines(self, columns: int) -> tuple[str, str, list[str]]:
        """(before the bar, after the bar, lines below) for a terminal; what does not fit is left out as a whole.

        Step and time come first and stay in 40 columns; the run's name is shown where there is room.
        """
        first = packed(self.position(), columns, 1)[0]
        bar = LEAST_BAR_CELLS + len(BETWEEN)
        title = self.run.name + BETWEEN if len(self.run.name) + len(BETWEEN) + len(first) + bar <= columns else ""
        return title, first, packed(self.measurements(), columns, 2)

    def bar_cells(self, columns: int, used: int) -> int:
        """How long the bar is beside `used` columns of text; 0 where it would be too short to read."""
        cells = min(MOST_BAR_CELLS, columns - used - len(BETWEEN))
        return cells if cells >= LEAST_BAR_CELLS else 0

    def summary(self, ending: Ending) -> str:
        """The closing sentence: how far, how long, the mean rate, exposed communication and goodput."""
        totals, elapsed_s = self.totals, self.elapsed_s
        of = "" if self.run.open_end else f" of {self.run.total_steps:,}"
        reached = "" if ending.state == "finished" else f" at step {self.step:,}{of}"
        opening = f"{ending.state}{reached}: {units.plural(totals.steps, 'step')} in {units.duration(elapsed_s)}"
        if totals.steps == 0 or totals.step_s <= 0:
            return opening
        quantity, unit = (totals.tokens, "tokens/s") if totals.tokens > 0 else (totals.samples, "samples/s")
        rate = [f"{units.count(quantity / totals.step_s)} {unit}"] if quantity > 0 else []
        parts = [opening, f"{units.seconds(totals.step_s / totals.steps)} a step", *rate]
        whole = self.goodput.waterfall()
        share = None if whole is None else whole.goodput
        goodput = [] if share is None else [f"goodput {units.percent(share)}"]
        exposed = f"exposed communication {units.percent(totals.exposed_s / totals.step_s)}"
        return ", ".join([*parts, exposed, *goodput])

    def _table(self) -> list[tuple[str, str, Mapping[str, float], Callable[[float], str]]]:
        return [
            ("loss", "loss/train", self.values, units.loss),
            ("held out", "loss/eval", self.held_out, units.loss),
            ("accuracy", "accuracy/eval", self.held_out, units.percent),
        ]

    def _mfu(self) -> list[str]:
        return [f"MFU {units.percent(self.values['throughput/mfu'])}"] if "throughput/mfu" in self.values else []

    def _epoch(self) -> list[str]:
        samples, epoch = self.values.get("samples/consumed"), self.run.epoch_samples
        return [f"epoch {samples / epoch:.2f}"] if samples is not None and epoch else []

    def _waits(self) -> list[str]:
        step_s = self.values.get("time/step", 0.0)
        if step_s <= 0:
            return []
        parts = []
        if (sync_s := self.values.get("time/sync_exposed")) is not None:
            parts.append(f"sync {units.percent(sync_s / step_s)}")
        if (data_s := self.values.get("time/data", 0.0)) > SLOW_DATA_SHARE * step_s:
            parts.append(f"data wait {units.percent(data_s / step_s)}")
        return parts

    def _memory(self) -> list[str]:
        peak_bytes = self.values.get("memory/peak_bytes")
        return [] if peak_bytes is None else [f"memory {units.memory_size(peak_bytes)}"]

    def _rate(self) -> list[str]:
        return [f"lr {self.values['lr']:.2e}"] if "lr" in self.values else []

    def _noise(self) -> list[str]:
        """The last that was measured: it is not measured in every step."""
        found = self.critical_batch
        return [] if found is None else [f"critical batch {units.count(round(found))}"]


def packed(parts: Sequence[str], columns: int, lines: int) -> list[str]:
    """`parts` in their order on at most `lines` lines of `columns`; from the first that has no room on, they are left
    out. A part that is longer than a line is cut."""
    found = [""]
    for part in parts:
        longer = f"{found[-1]}{BETWEEN}{part}" if found[-1] else part[:columns]
        if len(longer) <= columns:
            found[-1] = longer
        elif len(found) < lines:
            found.append(part[:columns])
        else:
            break
    return found
