"""What is simulated: tasks, what they wait for, and what they occupy.

A task is ready when the results of all that it waits for have arrived. It then needs

    a stream   a rank's compute stream: one task at a time, in the order in which they got ready
    ports      ends of links, which tasks share: see `Played`

for `busy_s` seconds, longer where ports are shared. Its result arrives `latency_s` later, which occupies nobody.
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
        if after and not 0 <= min(after) <= max(after) < number:
            raise ValueError(f"{name} waits for {list(after)}: there are {number} earlier tasks; name those only")
        self.tasks.append(Task(name, kind, rank, stream, ports, busy_s, latency_s, tuple(after)))
        return number


# The discrete-event core: plays tasks on streams and shared ports.
#
# Streams are first come, first served. A port divides its rate evenly among the tasks on it, and a task that holds
# several ports moves at the rate of its fullest: with n(p) tasks on port p, the rate of a task is
#
#     1 / max over its ports of n(p)
#
# so that a small message beside a large one is slowed down, not stopped, as on a network that is fair to its flows. It
# is max-min fairness without giving away what a bottleneck elsewhere leaves unused, and so never too fast.
#
# Events are taken in the order of their time, ties in the order in which they arose: the same tasks play the same way.


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


class _Player:
    """The state of a simulation: a clock that jumps from event to event.

    Columns of the tasks lie in lists of their own, and so do those of flows, which are tasks on ports: seconds of work
    left at full rate, the rate, and since when. An event is (time, order, task) where a task gets ready, and (time,
    order, ~task) where it ends; an end counts if its order is the newest of the task, since flows change their rate.
    """

    def __init__(self, plan: Tasks) -> None:
        tasks = self.tasks = plan.tasks
        self.stream, self.ports = [task.stream for task in tasks], [task.ports for task in tasks]
        self.busy_s, self.latency_s = [task.busy_s for task in tasks], [task.latency_s for task in tasks]
        self.starts, self.ends, self.ready_s = [0.0] * len(tasks), [0.0] * len(tasks), [0.0] * len(tasks)
        self.missing = [len(task.after) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for earlier in task.after:
                self.followers[earlier].append(number)
        self.running = [False] * plan.streams
        self.waiting: list[deque[int]] = [deque() for _ in range(plan.streams)]
        self.on_port: list[dict[int, None]] = [{} for _ in range(plan.ports)]
        self.load = [0] * plan.ports
        self.left_s, self.rate, self.since_s = list(self.busy_s), [1.0] * len(tasks), [0.0] * len(tasks)
        self.newest = [-1] * len(tasks)
        self.order = count()
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> Played:
        """Takes all events."""
        events, newest = self.events, self.newest
        for number, missing in enumerate(self.missing):
            if not missing:
                heapq.heappush(events, (0.0, next(self.order), number))
        while events:
            now_s, order, code = heapq.heappop(events)
            if code >= 0:
                self._ready(code, now_s)
            elif newest[~code] == order:
                self._end(~code, now_s)
        return Played(self.tasks, self.starts, self.ends)

    def _ready(self, number: int, now_s: float) -> None:
        stream = self.stream[number]
        if stream is not None:
            if self.running[stream]:
                self.waiting[stream].append(number)
                return
            self.running[stream] = True
        self._begin(number, now_s)

    def _begin(self, number: int, now_s: float) -> None:
        self.starts[number] = now_s
        ports, busy_s = self.ports[number], self.busy_s[number]
        if ports and busy_s:
            self.since_s[number] = now_s
            for port in ports:
                self.on_port[port][number] = None
                self.load[port] += 1
            if self._fullest(number) > 1:
                self._share(number, now_s)
        if self.newest[number] < 0:
            self._end_at(now_s + busy_s, number)

    def _end_at(self, time_s: float, number: int) -> None:
        order = self.newest[number] = next(self.order)
        heapq.heappush(self.events, (time_s, order, ~number))

    def _fullest(self, number: int) -> int:
        """Flows on the fullest port of a task."""
        return max(map(self.load.__getitem__, self.ports[number]))

    def _share(self, changed: int, now_s: float) -> None:
        """New rates for the flows on the ports of a task that came or went, where they are others than before."""
        on_port, left_s, since_s = self.on_port, self.left_s, self.since_s
        for number in dict.fromkeys(one for port in self.ports[changed] for one in on_port[port]):
            rate, before = 1 / self._fullest(number), self.rate[number]
            if rate == before:
                continue
            left_s[number] = max(0.0, left_s[number] - (now_s - since_s[number]) * before)
            since_s[number], self.rate[number] = now_s, rate
            self._end_at(now_s + left_s[number] / rate, number)

    def _end(self, number: int, now_s: float) -> None:
        self.ends[number] = now_s
        ports, stream = self.ports[number], self.stream[number]
        if ports and self.busy_s[number]:
            crowded = self._fullest(number) > 1
            for port in ports:
                del self.on_port[port][number]
                self.load[port] -= 1
            if crowded:
                self._share(number, now_s)
        if stream is not None:
            self._next_on(stream, now_s)
        arrives_s, ready_s, missing = now_s + self.latency_s[number], self.ready_s, self.missing
        ready = []
        for follower in self.followers[number]:
            if arrives_s > ready_s[follower]:
                ready_s[follower] = arrives_s
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
        at_once = not self.events or self.events[0][0] > now_s
        for follower in ready:
            if at_once and ready_s[follower] == now_s:
                self._ready(follower, now_s)
            else:
                heapq.heappush(self.events, (ready_s[follower], next(self.order), follower))

    def _next_on(self, stream: int, now_s: float) -> None:
        if self.waiting[stream]:
            self._begin(self.waiting[stream].popleft(), now_s)
        else:
            self.running[stream] = False
