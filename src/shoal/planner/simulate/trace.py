"""A played step in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a simulated device, three threads: what it computes, what it sends, its collectives. Complete events ("X")
with times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from shoal.planner.simulate.step import SimulatedStep

_THREADS = MappingProxyType({"compute": 0, "optimizer": 0, "transfer": 1, "collective": 2})
_NAMES = ("compute", "send", "collectives")
_MICRO = 1e6


def trace(step: SimulatedStep) -> dict[str, Any]:
    """The whole file as plain values."""
    return {"displayTimeUnit": "ms", "traceEvents": [*_headings(step), *_events(step)]}


def _headings(step: SimulatedStep) -> Iterator[dict[str, Any]]:
    for place in step.places:
        name = f"replica {place.replica}, pipeline rank {place.rank}" + (f", peer {place.peer}" if place.peer else "")
        yield {"ph": "M", "name": "process_name", "pid": place.number, "args": {"name": name}}
        for thread, what in enumerate(_NAMES):
            yield {"ph": "M", "name": "thread_name", "pid": place.number, "tid": thread, "args": {"name": what}}


def _events(step: SimulatedStep) -> Iterator[dict[str, Any]]:
    played = step.played
    for task, start_s, end_s in zip(played.tasks, played.starts_s, played.ends_s, strict=True):
        thread = _THREADS.get(task.kind)
        if thread is None or not end_s + task.latency_s > start_s:
            continue
        yield {
            "ph": "X",
            "name": task.name,
            "cat": task.kind,
            "pid": task.rank,
            "tid": thread,
            "ts": round(start_s * _MICRO, 3),
            "dur": round((end_s - start_s + task.latency_s) * _MICRO, 3),
        }
