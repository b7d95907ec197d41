"""When every action of a table would start and end, given how long each takes: the bubble, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.schedules.action import Action
from shoal.schedules.order import needs, walk
from shoal.schedules.table import Table

Seconds = float | Sequence[float]
"""One duration, or one for each stage."""


@dataclass(frozen=True)
class Timeline:
    """`spans[rank]` are (action, start_s, end_s) in order, from the moment the first rank starts."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def makespan_s(self) -> float:
        """When the last action of all ends."""
        return max((row[-1][2] for row in self.spans if row), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of computation, by rank."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """1 - busy / makespan, by rank."""
        whole_s = self.makespan_s
        return tuple(1 - busy_s / whole_s if whole_s else 0.0 for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The mean of the ranks' idle shares."""
        return sum(self.idle_shares) / len(self.spans)


def timeline(
    table: Table,
    *,
    forward_s: Seconds,
    backward_input_s: Seconds,
    backward_weight_s: Seconds,
    send_s: float = 0.0,
) -> Timeline:
    """Plays a table that `check` accepts: ranks in their rows' order, as soon as what an action takes is there.

    A whole backward takes both of its parts' time. `send_s` passes between the end of an action and the start of one
    that takes its result on another rank; sending itself occupies nobody.
    """
    forward, inputs, weights = (_by_stage(s, table) for s in (forward_s, backward_input_s, backward_weight_s))
    whole = [a + b for a, b in zip(inputs, weights, strict=True)]
    lasts = {"F": forward, "B": whole, "I": inputs, "W": weights}
    needed = needs(table)
    free_s = [0.0] * table.ranks
    ends: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(table.ranks)]
    for rank, action in walk(table, needed):
        there = [ends[a] + send_s * (table.placement[a.stage] != rank) for a in needed[action]]
        start_s = max(free_s[rank], *there) if there else free_s[rank]
        ends[action] = free_s[rank] = start_s + lasts[action.kind][action.stage]
        spans[rank].append((action, start_s, ends[action]))
    return Timeline(tuple(map(tuple, spans)))


def in_flight(table: Table) -> tuple[int, ...]:
    """The most activations that each rank stores at once, in microbatches of one stage: from F until B or W."""
    peaks = []
    for row in table.rows:
        stored = peak = 0
        for action in row:
            stored += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, stored)
        peaks.append(peak)
    return tuple(peaks)


def _by_stage(seconds: Seconds, table: Table) -> list[float]:
    if isinstance(seconds, Sequence):
        if len(seconds) != table.stages:
            raise ValueError(f"{len(seconds)} durations for {table.stages} stages: give one, or one for each stage")
        return list(seconds)
    return [seconds] * table.stages
