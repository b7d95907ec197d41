"""The attempts of a run: from each start to the stop that ended it, read off the order of its events. Pure.

A new attempt shows in four ways: a line without values (the writer says so), a step number that goes back, a generation
that grows, or a measurement that comes a second time for one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.observe.events import Event


@dataclass(frozen=True)
class Attempt:
    """Steps `first_step` to `last_step`; `repeated_steps` of them had been computed by the attempt before."""

    generation: int
    first_step: int
    last_step: int
    repeated_steps: int
    started_s: float
    ended_s: float
    away_s: float
    """Seconds between the last line of the attempt before and the first of this one."""


def attempts(events: Iterable[Event]) -> list[Attempt]:
    """Every attempt that left a line, in order."""
    found: list[Attempt] = []
    for group in groups(events):
        found.append(_attempt(group, found[-1] if found else None))
    return found


def last_attempt(events: Iterable[Event]) -> list[Event]:
    """The lines behind the last start, its own included; all of them where there was one start."""
    found = groups(events)
    return found[-1] if found else []


def training_time_s(found: Iterable[Attempt], *, first_step_s: float = 0.0) -> float:
    """Seconds in which the run trained. An event marks the end of a step: `first_step_s` is added to each attempt."""
    return sum(one.ended_s - one.started_s + first_step_s for one in found)


def failures(found: Sequence[Attempt], *, resumed: int) -> int:
    """How many attempts ended without having saved their last steps: a later one took them again. `resumed`: the step
    that the next attempt resumes from. A planned stop saves, and so do replicas that go on with the state.
    """
    lost = sum(one.repeated_steps > 0 for one in found[1:])
    return lost + (bool(found) and found[-1].last_step > resumed)


def groups(events: Iterable[Event]) -> list[list[Event]]:
    """The lines of each attempt, in order."""
    found: list[list[Event]] = []
    seen: set[str] = set()
    for event in events:
        last = found[-1][-1] if found else None
        if last is None or _begins_attempt(event, last, seen):
            found.append([])
            seen = set()
        elif event.step != last.step:
            seen = set()
        seen.update(event.values)
        found[-1].append(event)
    return found


def _begins_attempt(event: Event, last: Event, seen_at_step: set[str]) -> bool:
    again = event.step == last.step and not seen_at_step.isdisjoint(event.values)
    return not event.values or event.step < last.step or event.generation > last.generation or again


def _attempt(group: list[Event], before: Attempt | None) -> Attempt:
    opening, last = group[0], group[-1]
    first_step = opening.step if opening.values else opening.step + 1
    return Attempt(
        generation=last.generation,
        first_step=first_step,
        last_step=last.step,
        repeated_steps=max(0, before.last_step - first_step + 1) if before else 0,
        started_s=opening.time_s,
        ended_s=max(event.time_s for event in group),
        away_s=max(0.0, opening.time_s - before.ended_s) if before else 0.0,
    )
