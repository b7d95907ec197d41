"""What one rank did in the profiled steps. All times are seconds of rank 0's clock since the profile began."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import msgspec


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step of a rank: from `begin_s`, when it asked for data, to `end_s`; it waited until `data_s` for them.

    `data_cpu_s` is what its process computed before `data_s`, `cpu_s` what it computed after, over all its threads.
    """

    number: int
    begin_s: float
    data_s: float
    end_s: float
    data_cpu_s: float
    cpu_s: float


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """An operator on a thread of the host (`device` -1), or a kernel on a GPU and its stream `thread`."""

    name: str
    thread: int
    begin_s: float
    end_s: float
    device: int = -1


class Called(msgspec.Struct, frozen=True, array_like=True):
    """A collective or a message of this rank, from its start to the moment at which its end was seen."""

    key: str
    operation: str
    ranks: int
    sent_bytes: int
    begin_s: float
    end_s: float


class Waited(msgspec.Struct, frozen=True, array_like=True):
    """This rank stood still for the call of that key; "" where the call is not known."""

    key: str
    operation: str
    begin_s: float
    end_s: float


class Recording(msgspec.Struct, frozen=True):
    """One rank's steps. `thread` is the one that trains; `clock_error_s` is how far its clock may be off.

    `sources` says for operators with much time of their own which line of Python calls them most.
    """

    rank: int
    host: str
    thread: int
    steps: Sequence[Step]
    slices: Sequence[Slice]
    calls: Sequence[Called]
    waits: Sequence[Waited]
    sources: dict[str, str]
    clock_error_s: float = 0.0


# Who waits for whom: the same call on all its ranks, the rank that came last, and what was left for the wire. Pure.
#
# A rank that stands still for a call stands still for three reasons: until the last rank has begun the call, for that
# rank; from then on, for the wire; and once another rank has seen the end of a call that ends for all at once, for
# itself: something keeps it from its core.


ENDS_AT_ONCE = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})


@dataclass(frozen=True)
class Exposed:
    """A rank's standing still in a mean step: for the wire, for itself, and for other ranks, by rank.

    `sent_bytes` is what it sent, `by_operation_s` the wire's part by operation.
    """

    rank: int
    wire_s: float
    own_s: float
    for_rank_s: dict[int, float]
    by_operation_s: dict[str, float]
    sent_bytes: float


@dataclass(frozen=True)
class Joined:
    """A call as its ranks made it, the first to come first."""

    key: str
    operation: str
    calls: Sequence[tuple[int, Called]]

    @property
    def last(self) -> tuple[int, float]:
        """The rank that came last, and when."""
        rank, call = self.calls[-1]
        return rank, call.begin_s

    @property
    def ended_s(self) -> float:
        """When the first rank saw the end, and so the wire was done; infinite where not all can see it at once."""
        return min(call.end_s for _, call in self.calls) if self.operation in ENDS_AT_ONCE else math.inf


def joined(recordings: Sequence[Recording]) -> dict[str, Joined]:
    """The calls that were recorded by all ranks that took part, by key."""
    by_key: dict[str, list[tuple[int, Called]]] = defaultdict(list)
    for recording in recordings:
        for call in recording.calls:
            by_key[call.key].append((recording.rank, call))
    return {
        key: Joined(key, calls[0][1].operation, sorted(calls, key=lambda call: (call[1].begin_s, call[0])))
        for key, calls in by_key.items()
        if len(calls) == calls[0][1].ranks
    }


def exposed(recording: Recording, calls: dict[str, Joined]) -> Exposed:
    """What this rank stood still for in its steps. A wait for a call that is not known counts as the wire's."""
    wire_s, own_s, for_rank_s, by_operation_s = 0.0, 0.0, defaultdict(float), defaultdict(float)
    for wait in _in_steps(recording):
        late_s, culprit = _late(wait, calls, recording.rank)
        if culprit is not None:
            for_rank_s[culprit] += late_s
        self_s = _for_itself(wait, calls, late_s)
        own_s += self_s
        wire_s += wait.end_s - wait.begin_s - late_s - self_s
        by_operation_s[wait.operation] += wait.end_s - wait.begin_s - late_s - self_s
    count = len(recording.steps)
    return Exposed(
        recording.rank,
        wire_s / count,
        own_s / count,
        {rank: seconds / count for rank, seconds in for_rank_s.items()},
        {operation: seconds / count for operation, seconds in by_operation_s.items()},
        sum(call.sent_bytes for call in recording.calls) / count,
    )


def _in_steps(recording: Recording) -> Iterator[Waited]:
    """The waits as far as they lie in steps, behind what waits for data; each moment counts once."""
    until_s = -math.inf
    for wait in sorted(recording.waits, key=lambda wait: (wait.begin_s, wait.end_s)):
        for step in recording.steps:
            begin_s, end_s = max(wait.begin_s, step.data_s, until_s), min(wait.end_s, step.end_s)
            if end_s > begin_s:
                yield msgspec.structs.replace(wait, begin_s=begin_s, end_s=end_s)
                until_s = end_s


def _late(wait: Waited, calls: dict[str, Joined], rank: int) -> tuple[float, int | None]:
    """Seconds of the wait in which another rank had not begun the call, and that rank."""
    call = calls.get(wait.key)
    if call is None:
        return 0.0, None
    last, came_s = call.last
    late_s = min(came_s, wait.end_s) - wait.begin_s
    return (late_s, last) if last != rank and late_s > 0 else (0.0, None)


def _for_itself(wait: Waited, calls: dict[str, Joined], late_s: float) -> float:
    """Seconds of the wait after another rank had seen the end."""
    call = calls.get(wait.key)
    return 0.0 if call is None else max(0.0, wait.end_s - max(call.ended_s, wait.begin_s + late_s))


# How sure a share of the step is: its mean over rounds of steps, and the interval that noise leaves around it. Pure.
#
# The recorded steps are cut into n rounds, and each gives the share once. Of n shares with mean m and standard
# deviation s, the true one lies above
#
#     m - t s / sqrt(n),   t the 0.99 quantile of Student's distribution with n - 1 degrees of freedom,
#
# in 99 of 100 profiles. A bottleneck is named where that is more than what counts; one round alone says nothing.


MOST_ROUNDS = 20
_STUDENT = (
    31.82, 6.96, 4.54, 3.75, 3.36, 3.14, 3.00, 2.90, 2.82, 2.76, 2.72, 2.68, 2.65, 2.62, 2.60, 2.58, 2.57, 2.55, 2.54,
)  # fmt: skip
"""By degrees of freedom, from 1 on."""


@dataclass(frozen=True)
class Share:
    """Where the true share lies: `low` to `high`."""

    low: float
    high: float


def interval(shares: Sequence[float]) -> Share:
    """Of shares of 2 to `MOST_ROUNDS` rounds; everything is possible where there is one."""
    if len(shares) < 2:
        return Share(0.0, 1.0)
    beside = _STUDENT[len(shares) - 2] * stdev(shares) / math.sqrt(len(shares))
    return Share(mean(shares) - beside, mean(shares) + beside)


def rounds(recording: Recording) -> list[Recording]:
    """The recording cut into rounds of equally many steps, one after the other; the last may have more."""
    steps = recording.steps
    count = min(len(steps), MOST_ROUNDS)
    size = len(steps) // max(1, count)
    found = []
    for number in range(count):
        own = steps[number * size : (number + 1) * size if number < count - 1 else len(steps)]
        begin_s, end_s = own[0].begin_s, own[-1].end_s
        inside = {
            name: [one for one in getattr(recording, name) if one.end_s > begin_s and one.begin_s < end_s]
            for name in ("slices", "calls", "waits")
        }
        found.append(msgspec.structs.replace(recording, steps=own, **inside))
    return found
