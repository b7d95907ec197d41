"""Who waits for whom: the same call on all its ranks, the rank that came last, and what was left for the wire. Pure.

A rank that stands still for a call stands still for three reasons: until the last rank has begun the call, for that
rank; from then on, for the wire; and once another rank has seen the end of a call that ends for all at once, for
itself: something keeps it from its core.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from shoal.observe.profile.recording import Called, Recording, Waited

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
