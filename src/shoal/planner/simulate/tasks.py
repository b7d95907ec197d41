"""The simulator's core: tasks, what they wait for, and the resources that they occupy.

A task is ready when all that it waits for has arrived. It then stands in the queue of each resource that it needs (a
rank's compute stream, a port of a link); queues are first come, first served, so that two messages on one port share
its rate by taking turns. It occupies its resources for `busy_s`, and its result arrives `latency_s` later, which
occupies nobody.

    start = max(ready, free of every resource)    end = start + busy    arrival = end + latency

Events are taken in the order of the time at which tasks get ready, ties in the order in which tasks were added: the
same tasks give the same schedule, always.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["compute", "transfer", "collective", "optimizer", "join"]


class Task(NamedTuple):
    """`after` are the numbers of earlier tasks; `rank` is the simulated rank whose row of a trace shows it."""

    name: str
    kind: Kind
    rank: int
    resources: tuple[int, ...]
    busy_s: float
    latency_s: float
    after: tuple[int, ...]


@dataclass
class Tasks:
    """A growing list of tasks. Resources are numbers, given out by `resource`."""

    tasks: list[Task] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)

    def resource(self, name: str) -> int:
        """A new resource, free from the start."""
        self.resources.append(name)
        return len(self.resources) - 1

    def add(
        self,
        name: str,
        kind: Kind,
        *,
        rank: int,
        resources: tuple[int, ...] = (),
        busy_s: float = 0.0,
        latency_s: float = 0.0,
        after: Sequence[int] = (),
    ) -> int:
        """Adds a task; its number is what others name in `after`, and only earlier tasks can be named."""
        self.tasks.append(Task(name, kind, rank, resources, busy_s, latency_s, tuple(after)))
        return len(self.tasks) - 1


@dataclass(frozen=True)
class Played:
    """Start and end of every task, seconds from the start of the step, and the tasks themselves."""

    tasks: Sequence[Task]
    resources: Sequence[str]
    starts_s: Sequence[float]
    ends_s: Sequence[float]

    @property
    def makespan_s(self) -> float:
        """When the last result has arrived."""
        ends = (end + task.latency_s for task, end in zip(self.tasks, self.ends_s, strict=True))
        return max(ends, default=0.0)

    def busy_s(self, resource: int) -> float:
        """Seconds in which a resource is occupied."""
        return sum(task.busy_s for task in self.tasks if resource in task.resources)


def play(plan: Tasks) -> Played:
    """Runs all tasks."""
    tasks = plan.tasks
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    missing, followers = [len(task.after) for task in tasks], _followers(tasks)
    ready_s = [0.0] * len(tasks)
    free_s = [0.0] * len(plan.resources)
    queue = [(0.0, number) for number, count in enumerate(missing) if not count]
    while queue:
        now_s, number = heapq.heappop(queue)
        task = tasks[number]
        start = max([now_s, *[free_s[one] for one in task.resources]])
        end = start + task.busy_s
        for one in task.resources:
            free_s[one] = end
        starts[number], ends[number] = start, end
        arrival = end + task.latency_s
        for follower in followers[number]:
            ready_s[follower] = max(ready_s[follower], arrival)
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(queue, (ready_s[follower], follower))
    return Played(tasks, plan.resources, starts, ends)


def _followers(tasks: Sequence[Task]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for earlier in task.after:
            if not 0 <= earlier < number:
                raise ValueError(f"task {number} ({task.name}) waits for {earlier}: only earlier tasks can be named")
            followers[earlier].append(number)
    return followers
