"""Where the time of a step went, what each kind of collective cost, and how the ranks compare. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.observe import series as curves
from shoal.observe.events import Event, series

PARTS = (
    ("data", "waiting for data"),
    ("forward_backward", "forward and backward"),
    ("sync_exposed", "exposed sync"),
    ("optimizer", "optimizer"),
    ("checkpoint_stall", "checkpoint stall"),
)
"""Measurements `time/...` whose sum, with what is left over, is `time/step`."""

_COLLECTIVE = re.compile(r"wire/([a-z_]{1,60})/bytes_sent")

EVEN_SPREAD = 0.05
"""Ranks whose own work differs by less than this share are called even."""


@dataclass(frozen=True)
class StepPart:
    """One part of the step: its share of all the time, and its seconds in one step."""

    key: str
    label: str
    share: float
    median_s: float
    mean_s: float


@dataclass(frozen=True)
class RankTime:
    """A rank's median step. Its own work is what the others wait for: data, forward and backward, optimizer."""

    rank: int
    steps: int
    step_s: float
    data_s: float
    forward_backward_s: float
    sync_exposed_s: float
    optimizer_s: float
    peak_bytes: float | None = None
    """The most memory that it held; None where that was not measured."""

    @property
    def work_s(self) -> float:
        """Seconds of a median step that this rank does not spend waiting for other ranks."""
        return self.data_s + self.forward_backward_s + self.optimizer_s


def parts_of_step(events: Sequence[Event]) -> list[StepPart]:
    """The parts that were measured, "other" last; [] where no step has a time. Shares are of the sum over all steps."""
    step_s = dict(zip(*series(events, "time/step"), strict=True))
    total_s = sum(value for value in step_s.values() if value > 0)
    if total_s <= 0:
        return []
    found: list[StepPart] = []
    rest = dict(step_s)
    for key, label in PARTS:
        steps, values = series(events, f"time/{key}")
        if not curves.finite(values):
            continue
        found.append(_part(key, label, values, total_s))
        for step, value in zip(steps, values, strict=True):
            rest[step] = rest.get(step, 0.0) - value
    left_over = [max(0.0, value) for step, value in rest.items() if step in step_s]
    return [*found, _part("other", "other", left_over, total_s)]


def rank_time(rank: int, events: Sequence[Event]) -> RankTime | None:
    """The medians of one rank, None where it has no timed step."""
    times = {key: curves.median(series(events, f"time/{key}")[1]) for key in ("step", *(key for key, _ in PARTS))}
    if times["step"] is None:
        return None
    return RankTime(
        rank=rank,
        steps=len(series(events, "time/step")[0]),
        step_s=times["step"],
        data_s=times["data"] or 0.0,
        forward_backward_s=times["forward_backward"] or 0.0,
        sync_exposed_s=times["sync_exposed"] or 0.0,
        optimizer_s=times["optimizer"] or 0.0,
        peak_bytes=max(curves.finite(series(events, "memory/peak_bytes")[1]), default=None),
    )


@dataclass(frozen=True)
class CollectiveCost:
    """What one kind of collective cost a rank in a mean step.

    Bytes that it sent, seconds that it stood still for it, and seconds in which it computed meanwhile.
    """

    name: str
    sent_bytes: float
    exposed_s: float
    hidden_s: float


def collective_costs(events: Sequence[Event]) -> list[CollectiveCost]:
    """The kinds that the rank used, the longest exposed time first; a step that did not use one counts as zero."""
    steps = len(series(events, "time/step")[0]) or 1
    names = {match[1] for event in events for key in event.values if (match := _COLLECTIVE.fullmatch(key))}
    found = [
        CollectiveCost(
            name, *(_sum(events, f"wire/{name}/{part}") / steps for part in ("bytes_sent", "exposed_s", "hidden_s"))
        )
        for name in sorted(names)
    ]
    return sorted(found, key=lambda cost: (-cost.exposed_s, -cost.sent_bytes))


def _sum(events: Sequence[Event], name: str) -> float:
    return sum(curves.finite(series(events, name)[1]))


def slowest(ranks: Iterable[RankTime]) -> tuple[RankTime, float] | None:
    """The rank with the most work of its own, and by what share that is above the median; None where ranks are even."""
    found = sorted(ranks, key=lambda time: time.work_s)
    if len(found) < 2:
        return None
    middle_s = statistics.median_low([time.work_s for time in found])
    excess = found[-1].work_s / middle_s - 1 if middle_s > 0 else 0.0
    return (found[-1], excess) if excess >= EVEN_SPREAD else None


def _part(key: str, label: str, values: Sequence[float], total_s: float) -> StepPart:
    numbers = curves.finite(values)
    total = sum(numbers)
    return StepPart(key, label, total / total_s, curves.median(numbers) or 0.0, curves.mean(numbers) or 0.0)
