"""A played step as the timeline of its schedule: when each pipeline rank computed what."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.planner.simulate.step import SimulatedStep
from shoal.schedules.action import Action
from shoal.schedules.timeline import Timeline


def timeline_of(step: SimulatedStep) -> Timeline:
    """Of the first simulated replica and peer. An action that was played in parts lasts from its first to its last."""
    first = {place.rank: place.number for place in reversed(step.places)}
    return Timeline(tuple(tuple(_spans(step, rank, first[rank])) for rank in range(step.table.ranks)))


def _spans(step: SimulatedStep, rank: int, place: int) -> Iterator[tuple[Action, float, float]]:
    played, numbers = step.played, list(step.actions[place])
    for action in step.table.rows[rank]:
        name = f"{action.kind}{action.microbatch} s{action.stage}"
        parts = next((i for i, number in enumerate(numbers) if played.tasks[number].name != name), len(numbers))
        mine, numbers = numbers[:parts], numbers[parts:]
        yield action, played.starts_s[mine[0]], played.ends_s[mine[-1]]
