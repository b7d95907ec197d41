"""What is known of a run beside its steps: `facts.json`, one object in the run directory.

Any key may be written, and the report shows all of them. It has a place of its own for these:

    "state"       how the run ended where it did not reach its last step: "stopped", "diverged", ...
    "world"       ranks                         "parameters"  numbers that are trained
    "loss_unit"   "nats/byte", "nats/token"     "baseline"    {"name": "bigram", "loss": 2.47}
    "evaluation"  {"loss": 2.04, ...}           "samples"     [{"step": 900, "prompt": "def ", "text": "..."}]

Numbers that are not finite become null. Only rank 0 writes.

The lives of a run: from each start to the stop that ended it, read off the order of its events. Pure.

A new life shows in four ways: a line without values (the writer says so), a step number that goes back, a generation
that grows, or a measurement that comes a second time for one step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import UsageError
from shoal.observe.events import Event


def facts_path(run_directory: Path) -> Path:
    """Where the facts lie."""
    return run_directory / "facts.json"


def read_facts(run_directory: Path) -> dict[str, Any]:
    """The facts so far, {} where there are none. Raises `UsageError` for a file that holds no JSON object."""
    path = facts_path(run_directory)
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise UsageError(f"{path} is no JSON object ({fault}); move it away, and the run writes a new one") from fault


def write_facts(run_directory: Path, facts: Mapping[str, Any]) -> None:
    """Adds `facts` to those on disk; a key that is there already is replaced. A reader sees the old file or the new."""
    merged = read_facts(run_directory) | dict(facts)
    run_directory.mkdir(parents=True, exist_ok=True)
    replace_file(facts_path(run_directory), msgspec.json.format(msgspec.json.encode(merged), indent=2) + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file by one atomic rename, after its bytes have reached the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@dataclass(frozen=True)
class Life:
    """Steps `first_step` to `last_step`; `repeated_steps` of them had been computed by the life before."""

    generation: int
    first_step: int
    last_step: int
    repeated_steps: int
    started_s: float
    ended_s: float
    away_s: float
    """Seconds between the last line of the life before and the first of this one."""


def lives(events: Iterable[Event]) -> list[Life]:
    """Every life that left a line, in order."""
    found: list[Life] = []
    for group in _groups(events):
        found.append(_life(group, found[-1] if found else None))
    return found


def last_life(events: Iterable[Event]) -> list[Event]:
    """The lines behind the last start, its own included; all of them where there was one start."""
    groups = _groups(events)
    return groups[-1] if groups else []


def training_time_s(found: Iterable[Life], *, first_step_s: float = 0.0) -> float:
    """Seconds in which the run was alive; events are written at the end of a step, so a first one is added a life."""
    return sum(life.ended_s - life.started_s + first_step_s for life in found)


def _groups(events: Iterable[Event]) -> list[list[Event]]:
    groups: list[list[Event]] = []
    seen: set[str] = set()
    for event in events:
        last = groups[-1][-1] if groups else None
        if last is None or _begins_life(event, last, seen):
            groups.append([])
            seen = set()
        elif event.step != last.step:
            seen = set()
        seen.update(event.values)
        groups[-1].append(event)
    return groups


def _begins_life(event: Event, last: Event, seen_at_step: set[str]) -> bool:
    again = event.step == last.step and not seen_at_step.isdisjoint(event.values)
    return not event.values or event.step < last.step or event.generation > last.generation or again


def _life(group: list[Event], before: Life | None) -> Life:
    opening, last = group[0], group[-1]
    first_step = opening.step if opening.values else opening.step + 1
    return Life(
        generation=last.generation,
        first_step=first_step,
        last_step=last.step,
        repeated_steps=max(0, before.last_step - first_step + 1) if before else 0,
        started_s=opening.time_s,
        ended_s=max(event.time_s for event in group),
        away_s=max(0.0, opening.time_s - before.ended_s) if before else 0.0,
    )
