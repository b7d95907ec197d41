"""A parameter server on a virtual clock: the rules of `admission`, and workers that take a stated time to compute.

Nothing waits: the time of the next event is the earliest end of a computation, and events at the same time happen in
the order of the workers' numbers. The same arguments give the same events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shoal.sync.admission import Accounts, Contribution, Effects, Rule, Update

ComputeTime = Callable[[int, int], float]
"""Seconds that a worker (first argument) takes to compute its contribution with the number (second argument)."""


class Change(NamedTuple):
    """At `time_s`, `worker` leaves (dies in the midst of its computation) or joins again."""

    time_s: float
    worker: int
    what: Literal["leave", "join"]


@dataclass
class Watch:
    """What is told of a simulation: a worker read the parameters of a version; an update was made."""

    on_read: Callable[[int, int], None] = lambda worker, version: None
    on_update: Callable[[Update], None] = lambda update: None


@dataclass
class Simulation:
    """Workers of `rule`, all present ones beginning at time 0. `now_s` is the virtual time in seconds.

    `give_up`: workers that are too late for an update stop computing, and begin the next contribution with the others.
    """

    rule: Rule
    compute_s: ComputeTime
    changes: Iterable[Change] = ()
    watch: Watch = field(default_factory=Watch)
    give_up: bool = False

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.accounts = Accounts()
        self._read: dict[int, tuple[int, int]] = {}  # by worker that computes: (contribution's number, version)
        self._made: dict[int, int] = {}
        self._events: list[tuple[float, int, int, str]] = []  # (time, worker, contribution's number, what)
        for change in self.changes:
            heapq.heappush(self._events, (change.time_s, change.worker, -1, change.what))
        for worker in sorted(self.rule.present):
            self._begin(worker)

    def run(self, *, updates: int) -> None:
        """Until there were `updates` in all, or nothing is under way any more."""
        while self.rule.version < updates and self._events:
            self.now_s, worker, number, what = heapq.heappop(self._events)
            if what == "end":
                self._end(worker, number)
            elif what == "join" and worker not in self.rule.present:
                self._follow(self.rule.join(worker))
            elif what == "leave" and worker in self.rule.present:
                self._read.pop(worker, None)
                self._follow(self.rule.leave(worker))

    @property
    def idle(self) -> bool:
        """Whether no worker computes, and none ever will."""
        return not self._events

    def _begin(self, worker: int) -> None:
        number = self._made[worker] = self._made.get(worker, -1) + 1
        self._read[worker] = number, self.rule.version
        self.watch.on_read(worker, self.rule.version)
        heapq.heappush(self._events, (self.now_s + self.compute_s(worker, number), worker, number, "end"))

    def _end(self, worker: int, number: int) -> None:
        if worker not in self._read or self._read[worker][0] != number:
            return  # it died, or gave up
        _, version = self._read.pop(worker)
        contribution = Contribution(worker, number, version)
        effects = self.rule.arrive(contribution)
        self.accounts.arrived(contribution, effects, now_s=self.now_s)
        self._follow(effects, accounted=True)

    def _follow(self, effects: Effects, *, accounted: bool = False) -> None:
        if not accounted:
            self.accounts.followed(effects, now_s=self.now_s)
        for update in effects.updates:
            self.watch.on_update(update)
        for worker in (*effects.released, *(effects.late if self.give_up else ())):
            self._begin(worker)
