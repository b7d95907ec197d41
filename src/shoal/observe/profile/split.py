"""One rank's steps split into what it did: data, exposed communication, compute, host; and its operators. Pure.

The parts do not overlap and add up to the step. In this order, each takes what those before it left:

    data            waiting for the feed
    communication   standing still for collectives and messages; on a GPU, their kernels while no other kernel runs
    compute         operators on the thread that trains; on a GPU, kernels
    host            the rest: Python, and what it calls that is no operator
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.observe.profile.recording import Recording, Slice

# Spans of time as sorted lists of (begin, end) that do not touch: union, intersection, difference, length. Pure.


Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """All the time that any of them covers."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(first: Spans, second: Spans) -> Spans:
    """The time that both cover; both are results of `union`."""
    found: Spans = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(first: Spans, second: Spans) -> Spans:
    """The time that the first covers and the second does not; both are results of `union`."""
    found: Spans = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(second) and second[k][0] < end:
            if at < second[k][0]:
                found.append((at, second[k][0]))
            at = max(at, second[k][1])
            k += 1
        if at < end:
            found.append((at, end))
    return found


def length(spans: Spans) -> float:
    """How much time they cover; of results of `union`."""
    return sum(end - begin for begin, end in spans)


COMMUNICATION_KERNELS = ("nccl", "rccl")


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a mean step of one rank; `cpu_share` is the share of its work in which its process had a core,
    `data_cpu_share` the same while it waited for data; a process with several threads may have more than one."""

    rank: int
    step_s: float
    data_s: float
    communication_s: float
    compute_s: float
    host_s: float
    cpu_share: float
    data_cpu_share: float

    @property
    def work_s(self) -> float:
        """What this rank does itself once it has its data."""
        return self.compute_s + self.host_s


@dataclass(frozen=True)
class Operator:
    """Seconds of its own that an operator or kernel takes in a mean step, and how often it is called in one."""

    name: str
    own_s: float
    calls: float


def split(recording: Recording) -> TimeSplit:
    """Means over the recorded steps. There is at least one."""
    steps = recording.steps
    whole = union((step.begin_s, step.end_s) for step in steps)
    data = union((step.begin_s, step.data_s) for step in steps)
    on_host, on_device = _compute(recording)
    waits = union((wait.begin_s, wait.end_s) for wait in recording.waits)
    communication = union([*waits, *difference(_communication_kernels(recording), on_device)])
    communication = difference(intersection(communication, whole), data)
    taken = union([*data, *communication])
    compute = difference(intersection(on_device or on_host, whole), taken)
    count, total = len(steps), length(whole)
    rest_s = max(0.0, total - length(taken) - length(compute))
    busy_s = total - length(taken)
    return TimeSplit(
        rank=recording.rank,
        step_s=total / count,
        data_s=length(data) / count,
        communication_s=length(communication) / count,
        compute_s=length(compute) / count,
        host_s=rest_s / count,
        cpu_share=_share(sum(step.cpu_s for step in steps), busy_s),
        data_cpu_share=_share(sum(step.data_cpu_s for step in steps), length(data)),
    )


def operators(recording: Recording) -> list[Operator]:
    """By their own time, the longest first: that of an operator is without the operators that it calls, and without
    waits."""
    kernels = [piece for piece in recording.slices if piece.device >= 0 and not _communicates(piece)]
    chosen = kernels or [piece for piece in recording.slices if piece.thread == recording.thread]
    waits = union((wait.begin_s, wait.end_s) for wait in recording.waits)
    own: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for piece, spans in own_spans(chosen):
        own[piece.name] += length(difference(spans, waits)) if not kernels else length(spans)
        calls[piece.name] += 1
    count = len(recording.steps)
    found = [Operator(name, own_s / count, calls[name] / count) for name, own_s in own.items()]
    return sorted(found, key=lambda operator: -operator.own_s)


def own_spans(slices: Iterable[Slice]) -> list[tuple[Slice, Spans]]:
    """Each slice with the time in which none that it encloses runs. Slices of one thread nest or lie apart."""
    ordered = sorted(slices, key=lambda piece: (piece.device, piece.thread, piece.begin_s, -piece.end_s))
    children: dict[int, list[tuple[float, float]]] = defaultdict(list)
    open_: list[int] = []
    for index, piece in enumerate(ordered):
        while open_ and not _encloses(ordered[open_[-1]], piece):
            open_.pop()
        if open_:
            children[open_[-1]].append((piece.begin_s, piece.end_s))
        open_.append(index)
    return [
        (piece, difference(union([(piece.begin_s, piece.end_s)]), union(children[index])))
        for index, piece in enumerate(ordered)
    ]


def _encloses(outer: Slice, inner: Slice) -> bool:
    same = (outer.device, outer.thread) == (inner.device, inner.thread)
    return same and outer.begin_s <= inner.begin_s and inner.end_s <= outer.end_s


def _compute(recording: Recording) -> tuple[Spans, Spans]:
    """Operators of the thread that trains, and kernels that compute."""
    on_host = _spans(s for s in recording.slices if s.device < 0 and s.thread == recording.thread)
    return on_host, _spans(s for s in recording.slices if s.device >= 0 and not _communicates(s))


def _communication_kernels(recording: Recording) -> Spans:
    return _spans(s for s in recording.slices if s.device >= 0 and _communicates(s))


def _communicates(piece: Slice) -> bool:
    return piece.name.lower().startswith(COMMUNICATION_KERNELS)


def _spans(slices: Iterable[Slice]) -> Spans:
    return union((piece.begin_s, piece.end_s) for piece in slices)


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s > 0 else 0.0


def mean(values: Sequence[float]) -> float:
    """0 where there are none."""
    return sum(values) / len(values) if values else 0.0
