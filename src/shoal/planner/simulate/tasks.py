"""What is simulated: tasks, what they wait for, and what they occupy.

A task is ready when the results of all that it waits for have arrived. It then needs

    a stream   a rank's compute stream: one task at a time, in the order in which they got ready
    ports      ends of links, which tasks share: see `shoal.planner.simulate.play`

for `busy_s` seconds, longer where ports are shared. Its result arrives `latency_s` later, which occupies nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
