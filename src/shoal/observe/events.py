"""Measurements of a run: one line of JSON a step and rank, appended to `events/rank-00000.jsonl`.

    {"step": 12, "time": 1760000000.5, "generation": 0, "values": {"loss/train": 2.31, "grad/norm": null}}

`step` counts the optimizer steps done once this one is: the first is 1. JSON has no NaN: a value that is not finite
is written as null and read back as NaN. The file only grows. A run that resumes after step k writes a line without
values, then its steps k+1, k+2, ... behind those of the attempt before it. Readers let the later attempt win: `series`
drops what was computed again.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.errors import EnvironmentFault
from shoal.observe.sink import Ending, RunStart, Sink

_encode = msgspec.json.Encoder().encode
MAX_STEP = 10**15
"""No run has more steps; a larger number is a damaged line, and would overflow what is computed from it."""
MOST_LINE_BYTES = 16 << 20
"""A step with norms of all layers takes some hundred kilobytes."""


class Event(msgspec.Struct, frozen=True):
    """One line. Values are finite or NaN; a line without values says that an attempt continues after `step`."""

    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    time_s: Annotated[float, msgspec.Meta(ge=0, le=2.5e11)] = msgspec.field(name="time")
    generation: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)] = 0
    values: dict[str, float | None] = msgspec.field(default_factory=dict)

    def get(self, name: str) -> float | None:
        """The value of a measurement, NaN where it was not finite, None where this line does not have it."""
        if name not in self.values:
            return None
        value = self.values[name]
        return math.nan if value is None or not math.isfinite(value) else value


def events_path(run_directory: Path, rank: int) -> Path:
    """Where a rank's events lie."""
    return run_directory / "events" / f"rank-{rank:05d}.jsonl"


class EventWriter:
    """Appends one rank's lines; each is one `write` to the system, so a reader sees it at once and whole.

    A disk that is full must not end a training run: with `warn`, a line that cannot be written is given up, `warn` is
    called once for each spell of it, and the run goes on. Without `warn`, `OSError` is raised. A file that somebody
    removed ends the run: nobody will find what is written from then on.
    """

    def __init__(
        self, run_directory: Path, *, rank: int, generation: int = 0, warn: Callable[[str], None] | None = None
    ) -> None:
        """Opens or creates the file. Raises `EnvironmentFault` where that is impossible."""
        self.path = events_path(run_directory, rank)
        self.generation = generation
        self.lost_lines = 0
        self._warn = warn
        self._failing = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = _is_torn(self.path)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as fault:
            raise EnvironmentFault(
                f"{self.path} cannot be opened for writing: {fault.strerror}; "
                "make the run directory writable, or choose another with run.directory"
            ) from fault

    def write(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        """Appends the measurements of one step; `time_s` is Unix time. Raises `EnvironmentFault` if it is gone."""
        numbers: dict[str, float | None] = {name: float(value) for name, value in values.items()}
        event = Event(step=step, time_s=time_s, generation=self.generation, values=numbers)
        self._append(_encode(event) + b"\n")

    def resume(self, step: int, *, time_s: float) -> None:
        """Appends a line without values: a new attempt continues after `step`, and later steps so far are void."""
        self.write(step, {}, time_s=time_s)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        whole = b"\n" + line if self._torn else line
        if os.fstat(self._file).st_nlink == 0:
            raise EnvironmentFault(
                f"the run directory {self.path.parents[1]} was removed while the run wrote to it, or {self.path.name} "
                "in it: start the run again, and remove a run directory only when its run is over"
            )
        try:
            written = os.write(self._file, whole)
            if written < len(whole):
                self._torn = True
                raise OSError(f"{written} of {len(whole)} bytes were written")
        except OSError as fault:
            self._give_up(fault)
        else:
            self._torn = self._failing = False

    def _give_up(self, fault: OSError) -> None:
        if self._warn is None:
            raise fault
        self.lost_lines += 1
        if not self._failing:
            self._failing = True
            self._warn(f"{self.path} cannot be written ({fault}): these steps will be missing from the report")


class EventSink(Sink):
    """Appends every record to the rank's events; a run that resumes first voids the steps that it computes again."""

    def __init__(self, run_directory: Path, *, rank: int, warn: Callable[[str], None] | None = None) -> None:
        """`warn` hears of lines that cannot be written, as in `EventWriter`."""
        self._run_directory, self._rank, self._warn = run_directory, rank, warn
        self._writer: EventWriter | None = None

    def start(self, run: RunStart) -> None:
        """Opens the file. Raises `EnvironmentFault` where that is impossible."""
        self._writer = EventWriter(self._run_directory, rank=self._rank, generation=run.generation, warn=self._warn)
        if run.resumed_from is not None:
            self._writer.resume(run.resumed_from, time_s=time.time())

    def generation(self, run: RunStart) -> None:
        if self._writer is not None:
            self._writer.generation = run.generation
            self._writer.resume(run.first_step - 1, time_s=time.time())

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        if self._writer is not None:
            self._writer.write(step, values, time_s=time_s)

    def finish(self, ending: Ending) -> None:
        if self._writer is not None:
            self._writer.close()


def read_events(run_directory: Path, rank: int = 0) -> list[Event]:
    """A rank's lines in the order they were written; lines that are torn or damaged are left out. [] without a file."""
    return scan_events(run_directory, rank)[0]


def scan_events(run_directory: Path, rank: int = 0) -> tuple[list[Event], int]:
    """A rank's lines, and how many lines could not be read."""
    path = events_path(run_directory, rank)
    if not path.is_file():
        return [], 0
    events: list[Event] = []
    unreadable = 0
    decode = msgspec.json.Decoder(Event).decode
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            try:
                events.append(decode(line))
            except (ValueError, RecursionError):  # msgspec's and Unicode's own errors are ValueErrors
                unreadable += bool(line.strip())
    return events, unreadable


def series(events: Iterable[Event], name: str) -> tuple[list[int], list[float]]:
    """One measurement over the steps, strictly ascending; where a step was computed again, the later attempt counts."""
    steps: list[int] = []
    values: list[float] = []
    for event in events:
        value = event.get(name)
        while steps and (steps[-1] > event.step or (steps[-1] == event.step and value is not None)):
            steps.pop()
            values.pop()
        if value is not None:
            steps.append(event.step)
            values.append(value)
    return steps, values


def _is_torn(path: Path) -> bool:
    """Does the file end in the middle of a line?"""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


# What is drawn from a series of measurements: smooth curves, medians, fewer points. Pure.
#
# Values that are NaN are steps that were skipped: they count in nothing, and leave a gap where a curve is drawn.


def finite(values: Iterable[float]) -> list[float]:
    """The values that are numbers."""
    return [value for value in values if math.isfinite(value)]


def median(values: Iterable[float]) -> float | None:
    """The median of the finite values, None where there is none."""
    numbers = finite(values)
    return statistics.median(numbers) if numbers else None


def mean(values: Iterable[float]) -> float | None:
    """The mean of the finite values, None where there is none."""
    numbers = finite(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def smooth(values: Sequence[float], *, half_life: float) -> list[float]:
    """The exponential moving average with the bias correction of Adam (Kingma and Ba, 2015, section 3):

        y_t = sum_{s <= t} d^(t-s) x_s / sum_{s <= t} d^(t-s),    d = 2^(-1 / half_life)

    It is causal: a value says nothing about steps after its own, so the curve of a run that goes on never changes.
    `half_life` is in values. What is not finite counts in nothing and is NaN in the curve, which leaves a gap.
    """
    decay = 0.5 ** (1.0 / half_life)
    total, weight = 0.0, 0.0
    curve: list[float] = []
    for value in values:
        is_number = math.isfinite(value)
        total = decay * total + (value if is_number else 0.0)
        weight = decay * weight + is_number
        curve.append(total / weight if is_number else math.nan)
    return curve


def thin(xs: Sequence[float], ys: Sequence[float], *, limit: int) -> list[tuple[float, float]]:
    """At most `limit` points that look like all of them: of each run of neighbours, the lowest and the highest."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    if len(points) <= limit:
        return points
    buckets = max(1, limit // 2)
    kept: list[tuple[float, float]] = []
    for index in range(buckets):
        bucket = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        extremes = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept.extend(sorted(extremes))
    return kept


# The attempts of a run: from each start to the stop that ended it, read off the order of its events. Pure.
#
# A new attempt shows in four ways: a line without values (the writer says so), a step number that goes back, a
# generation that grows, or a measurement that comes a second time for one step.


@dataclass(frozen=True)
class Attempt:
    """Steps `first_step` to `last_step`; `repeated_steps` of them had been computed by the attempt before."""

    generation: int
    first_step: int
    last_step: int
    repeated_steps: int
    started_s: float
    ended_s: float
    away_s: float
    """Seconds between the last line of the attempt before and the first of this one."""


def attempts(events: Iterable[Event]) -> list[Attempt]:
    """Every attempt that left a line, in order."""
    found: list[Attempt] = []
    for group in groups(events):
        found.append(_attempt(group, found[-1] if found else None))
    return found


def last_attempt(events: Iterable[Event]) -> list[Event]:
    """The lines behind the last start, its own included; all of them where there was one start."""
    found = groups(events)
    return found[-1] if found else []


def training_time_s(found: Iterable[Attempt], *, first_step_s: float = 0.0) -> float:
    """Seconds in which the run trained. An event marks the end of a step: `first_step_s` is added to each attempt."""
    return sum(one.ended_s - one.started_s + first_step_s for one in found)


def failures(found: Sequence[Attempt], *, resumed: int) -> int:
    """How many attempts ended without having saved their last steps: a later one took them again. `resumed`: the step
    that the next attempt resumes from. A planned stop saves, and so do replicas that go on with the state.
    """
    lost = sum(one.repeated_steps > 0 for one in found[1:])
    return lost + (bool(found) and found[-1].last_step > resumed)


def groups(events: Iterable[Event]) -> list[list[Event]]:
    """The lines of each attempt, in order."""
    found: list[list[Event]] = []
    seen: set[str] = set()
    for event in events:
        last = found[-1][-1] if found else None
        if last is None or _begins_attempt(event, last, seen):
            found.append([])
            seen = set()
        elif event.step != last.step:
            seen = set()
        seen.update(event.values)
        found[-1].append(event)
    return found


def _begins_attempt(event: Event, last: Event, seen_at_step: set[str]) -> bool:
    again = event.step == last.step and not seen_at_step.isdisjoint(event.values)
    return not event.values or event.step < last.step or event.generation > last.generation or again


def _attempt(group: list[Event], before: Attempt | None) -> Attempt:
    opening, last = group[0], group[-1]
    first_step = opening.step if opening.values else opening.step + 1
    return Attempt(
        generation=last.generation,
        first_step=first_step,
        last_step=last.step,
        repeated_steps=max(0, before.last_step - first_step + 1) if before else 0,
        started_s=opening.time_s,
        ended_s=max(event.time_s for event in group),
        away_s=max(0.0, opening.time_s - before.ended_s) if before else 0.0,
    )


# The new whole lines of a file that grows: each call of `Tail.lines` goes on where the last one ended.


CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 22
"""A longer line is damage: it is skipped, and not kept in memory."""


class Tail:
    """Follows one file. A file that is missing, unreadable or no regular file has no lines yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._rest = b""

    def lines(self, *, most_bytes: int = 1 << 62) -> Iterator[bytes]:
        """Whole lines since the last call, from about `most_bytes` bytes. A file that shrank is read from its start.

        A line without its end stays for the next call.
        """
        for chunk in self._chunks(most_bytes):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest = b""
            yield from whole

    def _chunks(self, most_bytes: int) -> Iterator[bytes]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if os.fstat(descriptor).st_size < self.offset:
                self.offset, self._rest = 0, b""
            while most_bytes > 0 and (chunk := os.pread(descriptor, min(CHUNK_BYTES, most_bytes), self.offset)):
                self.offset += len(chunk)
                most_bytes -= len(chunk)
                yield chunk
        except OSError:
            return
        finally:
            os.close(descriptor)
