"""Goodput: the share of a run's time that went into steps which last and changed the weights. One definition, for the
terminal, the report and the live page (the "runtime goodput" of Google's ML productivity goodput). Pure.

    goodput = trained / whole,    whole: from the beginning of the first step to the last measurement, the time between
                                  a stop and the next attempt's first step included; starting up is not

The whole is a sum of parts, the waterfall:

trained      steps that last and changed the weights, less the two below
data         waiting for data in steps that last
stall        standing still for checkpoints
skipped      steps whose loss or gradient was not finite
redone       steps that a restart computed again
restarting   from the last line of an attempt to the start of the next; in an elastic run, from a step to the next one
             with other members
other        what is left: evaluations, and whatever lies between steps
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.config.load import read as read_tables
from shoal.errors import ConfigError, UsageError
from shoal.observe.events import Event, groups, median, read_events, series
from shoal.observe.facts import differing_keys, number_of, read_facts

DETECTING, RESTARTING = "membership/detecting_s", "membership/restarting_s"
"""What a change of an elastic run's membership cost: until a loss was known, and from there to the next step."""


class Waterfall(msgspec.Struct, frozen=True):
    """Seconds. `whole_s` is the sum of the others."""

    whole_s: float
    trained_s: float
    data_s: float
    stall_s: float
    skipped_s: float
    redone_s: float
    restarting_s: float
    other_s: float

    @property
    def goodput(self) -> float | None:
        """None of a run without a step."""
        return self.trained_s / self.whole_s if self.whole_s > 0 else None


class Goodput:
    """Adds up the lines of the lead rank; 20 bytes are kept for each step, which a restart may void."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._parts = [array("f") for _ in range(4)]
        self._sums = [0.0] * 4
        self._redone_s = self._away_s = 0.0
        self._first_s: float | None = None
        self._last_s = 0.0
        self._starts = False

    def add(self, event: Event, *, new_attempt: bool) -> None:
        """One line; `new_attempt`: the first one behind a start that was not the first."""
        if new_attempt:
            self._void_after(event.step - bool(event.values))
            self._starts = True
        if not event.values:
            return  # a start; an attempt that measures nothing took no time of training
        step_s = event.get("time/step")
        step_s = step_s if step_s is not None and math.isfinite(step_s) else 0.0
        begin_s = event.time_s - step_s
        if self._first_s is None:
            self._first_s = self._last_s = begin_s
        if self._starts:
            self._away_s += max(0.0, begin_s - self._last_s)
            self._starts = False
        self._away_s += sum(_seconds(event.get(name)) for name in (DETECTING, RESTARTING))
        self._last_s = max(self._last_s, event.time_s)
        if step_s > 0:
            self._append(event, step_s)

    def waterfall(self) -> Waterfall | None:
        """None before the first measurement."""
        if self._first_s is None:
            return None
        whole_s = self._last_s - self._first_s
        trained_s, data_s, stall_s, skipped_s = (max(0.0, total) for total in self._sums)
        known_s = trained_s + data_s + stall_s + skipped_s + self._redone_s + self._away_s
        whole_s = max(whole_s, known_s)
        return Waterfall(
            whole_s, trained_s, data_s, stall_s, skipped_s, self._redone_s, self._away_s, whole_s - known_s
        )

    def _append(self, event: Event, step_s: float) -> None:
        data_s, stall_s = (_seconds(event.get(f"time/{name}")) for name in ("data", "checkpoint_stall"))
        rest_s = max(0.0, step_s - data_s - stall_s)
        good = all(math.isfinite(event.get(name) or 0.0) for name in ("loss/train", "grad/norm"))
        self._steps.append(event.step)
        for index, value in enumerate((rest_s * good, data_s, stall_s, rest_s * (not good))):
            self._parts[index].append(value)
            self._sums[index] += self._parts[index][-1]  # as it is stored, so that it can be taken off again

    def _void_after(self, step: int) -> None:
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            for index, part in enumerate(self._parts):
                value = part.pop()
                self._sums[index] -= value
                self._redone_s += value


def goodput_of(events: Iterable[Event]) -> Goodput:
    """Of a run's events, from its first start on."""
    found = Goodput()
    for number, group in enumerate(groups(events)):
        for event in group:
            found.add(event, new_attempt=number > 0 and event is group[0])
    return found


def _seconds(value: float | None) -> float:
    return value if value is not None and 0 < value < math.inf else 0.0


# How much faster a run is than one rank alone (Amdahl, AFIPS 1967).
#
#     speed-up    S = r / r_1,    r samples per second of the run, r_1 of a run of the same model on one rank
#     efficiency  E = S / n,      n ranks
#
# Rates, not times: so both also hold where the run has a larger batch than the one rank had (weak scaling).


RATE = "throughput/samples_per_second"
SPEED_UP, EFFICIENCY = "scaling/speed_up", "scaling/efficiency"


@dataclass(frozen=True)
class Scaling:
    """What the rates of a run on `ranks` ranks are compared with: `one_rank`, samples per second."""

    one_rank: float
    ranks: int

    def figures(self, rate: float) -> dict[str, float]:
        """Speed-up and efficiency of a step at `rate` samples per second."""
        speed_up = rate / self.one_rank
        return {SPEED_UP: speed_up, EFFICIENCY: speed_up / self.ranks}


def one_rank_rate(directory: Path, model: Mapping[str, Any]) -> float:
    """The median samples per second of the later half of that run's steps.

    Raises `UsageError` where `directory` holds no such run: it had other ranks, or another `model` than this table.
    """
    found = series(read_events(directory), RATE)[1]
    rate = median(found[len(found) // 2 :])
    if not rate:
        raise UsageError(
            f"observe.one_rank = {str(directory)!r} has no steps to compare with: name the directory of a run that "
            "trained on one rank"
        )
    ranks = number_of(read_facts(directory).get("world"))
    if ranks != 1:
        said = "does not say how many ranks it had" if ranks is None else f"had {ranks:g} ranks"
        raise UsageError(
            f"observe.one_rank = {str(directory)!r} {said}: speed-up is told against one rank; train the run with "
            "run.processes=1 into a directory of its own, and name that"
        )
    for key, (here, there) in differing_keys([{"model": dict(model)}, {"model": _model(directory)}]).items():
        raise UsageError(
            f"observe.one_rank = {str(directory)!r} trained another model ({key} was {there!r}, here it is {here!r}): "
            "train this one on one rank, and name that directory"
        )
    return rate


def _model(directory: Path) -> dict[str, Any]:
    try:
        found = read_tables(directory / "run.toml").get("model")
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}
