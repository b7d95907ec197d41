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
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated

import msgspec

from shoal.errors import EnvironmentFault
from shoal.observe.ending import Ending
from shoal.observe.sink import RunStart, Sink

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
        numbers = {name: float(value) for name, value in values.items()}
        event = Event(step=step, time_s=time_s, generation=self.generation, values=dict(numbers))
        self._append(msgspec.json.encode(event) + b"\n")

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
