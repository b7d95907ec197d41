"""What the lead rank's events say, taken line by line: curves, goodput, communication and the loads of experts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from shoal.observe.events import Event
from shoal.observe.goodput import Goodput, Waterfall
from shoal.page.history import History

EXPERT_LIMIT = 48
MAX_EXPERTS = 2048
MAX_NAMES = 400
_COLLECTIVE = re.compile(r"wire/([a-z_]{1,60})/(bytes_sent|exposed_s|hidden_s)")
_EXPERT = re.compile(r"moe/load/(.{1,200})/(\d{1,4})")


class CollectiveMean(msgspec.Struct, frozen=True):
    """One kind of collective in a mean step: bytes sent, seconds exposed, seconds hidden."""

    name: str
    sent_bytes: float
    exposed_s: float
    hidden_s: float


class LinkMean(msgspec.Struct, frozen=True):
    """What the lead rank sends over one level of links in a mean step, and a second: "inside" a host or "between"."""

    level: str
    sent_bytes: float
    bytes_s: float


class ExpertMap(msgspec.Struct, frozen=True):
    """One mixture: `loads[expert][column]` in multiples of the mean load of the mixture in that column."""

    name: str
    last_steps: list[int]
    loads: list[list[float | None]]


@dataclass
class ExpertLoads:
    """The load of every expert of every mixture, from whichever rank recorded it."""

    _histories: dict[str, dict[int, History]] = field(default_factory=dict)
    _count: int = 0

    def add(self, event: Event) -> None:
        """One line of any rank."""
        for key, value in event.values.items():
            match = _EXPERT.fullmatch(key) if key.startswith("moe/load/") and value is not None else None
            if match is None:
                continue
            experts = self._histories.setdefault(match[1], {})
            if (number := int(match[2])) not in experts:
                if self._count >= MAX_EXPERTS:
                    continue
                self._count += 1
                experts[number] = History(EXPERT_LIMIT)
            experts[number].add(event.step, value or 0.0)

    def void_after(self, step: int) -> None:
        """Forgets the steps behind `step`."""
        for experts in self._histories.values():
            for history in experts.values():
                history.void_after(step)

    def maps(self) -> list[ExpertMap]:
        """A map for each mixture that has a record."""
        found = []
        for name, experts in self._histories.items():
            means = [{step: mean for step, mean, _, _ in experts[number].points()} for number in sorted(experts)]
            steps = sorted(set().union(*means))
            sums = {step: sum(row.get(step) or 0.0 for row in means) / len(means) for step in steps}
            loads = [[_over(row.get(step), sums[step]) for step in steps] for row in means]
            found.append(ExpertMap(name, steps, loads))
        return [one for one in found if one.last_steps]


def _over(load: float | None, mean: float) -> float | None:
    return round(load / mean, 3) if load is not None and mean > 0 else None


class Lead:
    """The lead rank's run so far. `attempts` counts the starts."""

    def __init__(self) -> None:
        self.series: dict[str, History] = {}
        self.goodput = Goodput()
        self.experts = ExpertLoads()
        self.last_step = 0
        self.last_time_s = 0.0
        self.attempts = 0
        self.restarts: list[int] = []
        """The steps after which a restart went on."""
        self.nonfinite_steps: list[int] = []
        self._generation = 0
        self._at_step: set[str] = set()

    def add(self, event: Event) -> None:
        """The next line of the file."""
        again = event.step == self.last_step and not self._at_step.isdisjoint(event.values)
        behind = event.step < self.last_step or event.generation > self._generation or again
        new_attempt = self.attempts > 0 and (behind or not event.values)
        if self.attempts == 0 or new_attempt:
            self.attempts += 1
        if new_attempt:
            self._void_after(event.step - bool(event.values))
        self.goodput.add(event, new_attempt=new_attempt)
        self._at_step = set(event.values) | (self._at_step if event.step == self.last_step else set())
        self.last_step, self.last_time_s, self._generation = event.step, event.time_s, event.generation
        self._take(event)

    @property
    def last(self) -> dict[str, float]:
        """The newest value of each measurement that has one."""
        return {name: history.last for name, history in self.series.items() if history.last is not None}

    def waterfall(self) -> Waterfall | None:
        """Where the time went; None before the first line."""
        return self.goodput.waterfall()

    def collectives(self) -> list[CollectiveMean]:
        """The kinds of collectives in a mean step, the longest exposed first."""
        steps = self.series["time/step"].count() if "time/step" in self.series else 0
        kinds: dict[str, dict[str, float]] = {}
        for name, history in self.series.items():
            if match := _COLLECTIVE.fullmatch(name):
                kinds.setdefault(match[1], {})[match[2]] = history.total() / max(1, steps)
        found = [
            CollectiveMean(kind, *(parts.get(part, 0.0) for part in ("bytes_sent", "exposed_s", "hidden_s")))
            for kind, parts in kinds.items()
        ]
        return sorted(found, key=lambda one: (-one.exposed_s, -one.sent_bytes))

    def links(self) -> list[LinkMean]:
        """By level; nothing before a step has told."""
        trained_s = self.series["time/step"].total() if "time/step" in self.series else 0.0
        found = []
        for level in ("inside", "between"):
            history = self.series.get(f"wire/{level}_bytes")
            if history is not None and history.count() and trained_s > 0:
                sent = history.total()
                found.append(LinkMean(level, sent / history.count(), sent / trained_s))
        return found

    def _take(self, event: Event) -> None:
        self.experts.add(event)
        bad = False
        for name in event.values:
            if name.startswith("moe/load/"):
                continue
            value = event.get(name)
            if value is None or (name not in self.series and len(self.series) >= MAX_NAMES):
                continue
            self.series.setdefault(name, History()).add(event.step, value)
            bad |= name in ("loss/train", "grad/norm") and value != value
        if bad:
            self.nonfinite_steps.append(event.step)

    def _void_after(self, step: int) -> None:
        self.restarts.append(step)
        self.experts.void_after(step)
        for history in self.series.values():
            history.void_after(step)
        while self.nonfinite_steps and self.nonfinite_steps[-1] > step:
            self.nonfinite_steps.pop()
