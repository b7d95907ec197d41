"""What is simulated: tasks, what they wait for, and what they occupy.

A task is ready when the results of all that it waits for have arrived. It then needs

    a stream   a rank's compute stream: one task at a time, in the order in which they got ready
    ports      ends of links, which tasks share: see `shoal.planner.simulate.play`

for `busy_s` seconds, longer where ports are shared. Its result arrives `latency_s` later, which occupies nobody.

The discrete-event core: plays tasks on streams and shared ports.

Streams are first come, first served. A port divides its rate evenly among the tasks on it, and a task that holds
several ports moves at the rate of its fullest: with n(p) tasks on port p, the rate of a task is

    1 / max over its ports of n(p)

so that a small message beside a large one is slowed down, not stopped, as on a network that is fair to its flows. It is
max-min fairness without giving away what a bottleneck elsewhere leaves unused, and so never too fast.

Events are taken in the order of their time, ties in the order in which they arose: the same tasks play the same way.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

Kind = Literal["compute", "transfer", "collective", "optimizer", "join"]


class Task(NamedTuple):
    """`after` are numbers of earlier tasks; `rank` is the simulated device in whose row a trace shows it."""

    name: str
    kind: Kind
    rank: int
    stream: int | None
    ports: tuple[int, ...]
    busy_s: float
    latency_s: float
    after: tuple[int, ...]


@dataclass
class Tasks:
    """A growing list of tasks on a number of streams and ports."""

    streams: int
    ports: int
    tasks: list[Task] = field(default_factory=list)

    def add(
        self,
        name: str,
        kind: Kind,
        *,
        rank: int = 0,
        stream: int | None = None,
        ports: tuple[int, ...] = (),
        busy_s: float = 0.0,
        latency_s: float = 0.0,
        after: Sequence[int] = (),
    ) -> int:
        """Adds a task; later ones name its number in `after`. Raises `ValueError` for a number not yet given."""
        number = len(self.tasks)
        if any(not 0 <= earlier < number for earlier in after):
            raise ValueError(f"{name} waits for {list(after)}: there are {number} earlier tasks; name those only")
        self.tasks.append(Task(name, kind, rank, stream, ports, busy_s, latency_s, tuple(after)))
        return number


@dataclass(frozen=True)
class Played:
    """Start and end of every task, seconds from the start, and the tasks themselves."""

    tasks: Sequence[Task]
    starts_s: Sequence[float]
    ends_s: Sequence[float]

    @property
    def makespan_s(self) -> float:
        """When the last result has arrived."""
        ends = (end + task.latency_s for task, end in zip(self.tasks, self.ends_s, strict=True))
        return max(ends, default=0.0)


def play(plan: Tasks) -> Played:
    """Runs all tasks."""
    return _Player(plan).run()


class _Flow:
    """A task on ports: seconds of work left at full rate, its rate, and since when."""

    __slots__ = ("left_s", "rate", "since_s", "version")

    def __init__(self, left_s: float) -> None:
        self.left_s, self.rate, self.since_s, self.version = left_s, 1.0, 0.0, 0


class _Player:
    """The state of a simulation: a clock that jumps from event to event."""

    def __init__(self, plan: Tasks) -> None:
        self.tasks: Sequence[Task] = plan.tasks
        self.starts, self.ends = [0.0] * len(self.tasks), [0.0] * len(self.tasks)
        self.ready_s, self.missing = [0.0] * len(self.tasks), [len(task.after) for task in self.tasks]
        self.followers: list[list[int]] = [[] for _ in self.tasks]
        for number, task in enumerate(self.tasks):
            for earlier in task.after:
                self.followers[earlier].append(number)
        self.running: list[int | None] = [None] * plan.streams
        self.waiting: list[deque[int]] = [deque() for _ in range(plan.streams)]
        self.on_port: list[dict[int, None]] = [{} for _ in range(plan.ports)]
        self.flows: dict[int, _Flow] = {}
        self.order = count()
        self.events: list[tuple[float, int, int, int]] = []

    def run(self) -> Played:
        """(time, order, task, version): version -1 says that a task is ready, any other that it ends."""
        for number, missing in enumerate(self.missing):
            if not missing:
                self._push(0.0, number, -1)
        while self.events:
            now_s, _, number, version = heapq.heappop(self.events)
            if version < 0:
                self._ready(number, now_s)
            elif version == self._version(number):
                self._end(number, now_s)
        return Played(self.tasks, self.starts, self.ends)

    def _push(self, time_s: float, number: int, version: int) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), number, version))

    def _version(self, number: int) -> int:
        """Which end of a task counts: 0 without ports, else its flow's newest; older ends are stale."""
        if number in self.flows:
            return self.flows[number].version
        return 0

    def _ready(self, number: int, now_s: float) -> None:
        stream = self.tasks[number].stream
        if stream is None:
            self._begin(number, now_s)
        elif self.running[stream] is None:
            self.running[stream] = number
            self._begin(number, now_s)
        else:
            self.waiting[stream].append(number)

    def _begin(self, number: int, now_s: float) -> None:
        task = self.tasks[number]
        self.starts[number] = now_s
        if not task.ports or not task.busy_s:
            self._push(now_s + task.busy_s, number, 0)
            return
        self.flows[number] = _Flow(task.busy_s)
        self.flows[number].since_s = now_s
        for port in task.ports:
            self.on_port[port][number] = None
        self._share(task, now_s)

    def _share(self, changed: Task, now_s: float) -> None:
        """New rates for all flows on the ports of a task that came or went."""
        if not any(self.on_port[port] for port in changed.ports):
            return
        for number in dict.fromkeys(one for port in changed.ports for one in self.on_port[port]):
            flow = self.flows[number]
            flow.left_s = max(0.0, flow.left_s - (now_s - flow.since_s) * flow.rate)
            flow.since_s = now_s
            flow.rate = 1 / max(len(self.on_port[port]) for port in self.tasks[number].ports)
            flow.version += 1
            self._push(now_s + flow.left_s / flow.rate, number, flow.version)

    def _end(self, number: int, now_s: float) -> None:
        task = self.tasks[number]
        self.ends[number] = now_s
        if self.flows.pop(number, None) is not None:
            for port in task.ports:
                del self.on_port[port][number]
            self._share(task, now_s)
        if task.stream is not None:
            self._next_on(task.stream, now_s)
        for follower in self.followers[number]:
            self.ready_s[follower] = max(self.ready_s[follower], now_s + task.latency_s)
            self.missing[follower] -= 1
            if not self.missing[follower]:
                self._push(self.ready_s[follower], follower, -1)

    def _next_on(self, stream: int, now_s: float) -> None:
        self.running[stream] = None
        if self.waiting[stream]:
            number = self.waiting[stream].popleft()
            self.running[stream] = number
            self._begin(number, now_s)
