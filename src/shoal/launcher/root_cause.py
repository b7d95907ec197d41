"""Which of several failed ranks is the cause, what the launcher exits with, and what it says.

One rank's end makes its peers fail, too, often within a millisecond and sometimes before the launcher sees the first.
So ends are ordered by what they are, and only then by time:

    1. errors of a rank's own, and deaths by a signal that the launcher did not send
    2. secondary errors: a collective that lost its peer, as Shoal explains it, then as a library does
    3. deaths by the launcher's own hand

The report shows the cause, whole, then a line for every other rank, which does not repeat what the cause said:

    rank 1 of 2 failed (host tuna, pid 4711, exit code 1):
    Traceback (most recent call last): ...
    rank 0 (pid 4710): lost another rank

Where several ranks failed for one reason, it stands first, and once:

    run.steps: found 0, must be at least 1
    4 of 4 ranks failed with this, rank 2 first (host tuna, pid 4712, exit code 2)
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import CollectiveError, OutOfMemory, Stopped
from shoal.launcher.failure import Failure


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended. `code` is negative for a signal; `by_launcher`: a signal that the launcher sent."""

    rank: int
    pid: int
    code: int
    time_ns: int
    by_launcher: bool = False

    @property
    def failed(self) -> bool:
        """Neither done nor stopped after a good checkpoint."""
        return self.code not in (0, Stopped.exit_code)


@dataclass(frozen=True)
class End:
    """A failed rank: its process's end, and the record that it left, if it could."""

    exit: Exit
    failure: Failure | None

    @property
    def order(self) -> tuple[int, bool, int]:
        """The cause sorts first."""
        if self.failure is not None:
            explained = self.failure.kind == CollectiveError.__name__
            return int(self.failure.secondary), not explained, self.failure.time_ns
        return (2 if self.exit.by_launcher else 0), True, self.exit.time_ns

    @property
    def primary(self) -> bool:
        """Whether the rank failed of itself, as far as it or the kernel says."""
        return self.order[0] == 0

    @property
    def sentence(self) -> str:
        """How the rank ended, in a line."""
        return self.failure.headline if self.failure is not None else how(self.exit)


def root_cause(failures: Iterable[Failure], exits: Iterable[Exit]) -> list[End]:
    """The ranks that failed, the cause first."""
    records = {failure.rank: failure for failure in failures}
    ends = [End(end, records.get(end.rank)) for end in exits if end.failed]
    return sorted(ends, key=lambda end: end.order)


def exit_code(exits: Iterable[Exit], ends: list[End]) -> int:
    """The launcher's exit code: the cause's (128 + n for signal n), else 75 if any rank stopped, else 0."""
    if ends:
        code = ends[0].exit.code
        return 128 - code if code < 0 else code
    return Stopped.exit_code if any(end.code == Stopped.exit_code for end in exits) else 0


MOST_LINES, MOST_SPANS = 64, 6
"""Ranks that get a line each; of more, those of whom the same is said share one, with so many spans of numbers."""
_HINTS: Mapping[int, str] = {
    signal.SIGKILL: "the launcher did not send it; where memory runs out the kernel does: see `dmesg`, or use less "
    "of it",
    signal.SIGBUS: "memory that lies in a file could not be read or written (parameters on disk by memory.offload, a "
    "mapped data set, /dev/shm): its disk has an error or is full, see `dmesg`; the newest checkpoint is whole",
}
"""What a rank that was killed cannot say itself."""


def failure_report(
    ends: Sequence[End],
    exits: Sequence[Exit],
    *,
    stopped: Mapping[int, int],
    log_tails: Mapping[int, str],
    world_size: int | None = None,
) -> str:
    """The report's text. `ends`: failed ranks, the cause first; `stopped`: pid by rank, of those held by SIGSTOP.

    `world_size` counts the ranks of all hosts; without it, those of `exits` are all.
    """
    cause = ends[0]
    held = [f"rank {rank} (pid {pid}) is stopped (SIGSTOP); kill -CONT lets it go on" for rank, pid in stopped.items()]
    alike = [end for end in ends if end is cause or _is_the_same(end, cause)]
    headline = _headline(cause, world_size or len(exits), log_tails.get(cause.exit.rank, ""), alike=len(alike))
    # Where all the failed ranks only lost a peer, a rank that is held is the peer that they lost.
    lines = [headline, *held] if cause.primary else [*held, headline]
    failures = {end.exit.rank: end for end in ends}
    told = {end.exit.rank for end in alike}
    others = sorted((end for end in exits if end.rank not in told), key=lambda end: end.rank)
    said = [(end, _line(end, failures.get(end.rank), cause, stopped)) for end in others]
    return "\n".join([*lines, *(_by_words(said) if len(said) > MOST_LINES else [text for _, text in said])])


def _by_words(said: Sequence[tuple[Exit, str]]) -> list[str]:
    """A line for each thing that is said, with the ranks that it is said of."""
    ranks: dict[str, list[int]] = {}
    for end, text in said:
        ranks.setdefault(text.partition(": ")[2], []).append(end.rank)
    return [f"{len(of)} rank{'s' if len(of) > 1 else ''} ({_spans(of)}): {words}" for words, of in ranks.items()]


def _spans(ranks: Sequence[int]) -> str:
    """As "0-6, 8-4095"; of many pieces the first few."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:MOST_SPANS]]
    return ", ".join([*shown, *(["..."] if len(spans) > MOST_SPANS else [])])


def _is_the_same(end: End, cause: End) -> bool:
    """Whether the rank failed by itself for the reason of the cause, or left in the same way without a word."""
    if end.failure is None or cause.failure is None:
        speechless = end.failure is cause.failure and not end.exit.by_launcher
        return speechless and end.exit.code == cause.exit.code and end.exit.code > 0
    apart = end.failure.secondary or end.failure.kind == OutOfMemory.__name__  # in words of their own
    return not apart and end.sentence == cause.sentence


def _headline(end: End, world_size: int, log_tail: str, *, alike: int) -> str:
    host = end.failure.host if end.failure else socket.gethostname()
    if alike > 1:
        who = f"rank {end.exit.rank} first (host {host}, pid {end.exit.pid}, {how(end.exit)})"
        return f"{_words(end, log_tail)}\n{alike} of {world_size} ranks failed with this, {who}"
    first = f"rank {end.exit.rank} of {world_size} failed (host {host}, pid {end.exit.pid}, {how(end.exit)})"
    return f"{first}:\n{_words(end, log_tail)}"


def _words(end: End, log_tail: str) -> str:
    if end.failure is not None:
        return end.failure.text
    if end.exit.by_launcher:
        return "it did not end by itself in time, and the launcher ended it"
    said = (_HINTS.get(-end.exit.code), f"the end of its log:\n{log_tail}" if log_tail else None)
    return "\n".join(filter(None, said)) or "it left no message"


def _line(end: Exit, failed: End | None, cause: End, stopped: Collection[int]) -> str:
    start = f"rank {end.rank} (pid {end.pid}): "
    if failed is None:
        return start + ("finished" if end.code == 0 else "stopped after a good checkpoint")
    if failed.failure is not None:
        if failed.failure.secondary:
            return f"{start}lost another rank"
        if failed.failure.kind == OutOfMemory.__name__ and cause.exit.code == OutOfMemory.exit_code:
            return f"{start}out of memory, too"
        return start + failed.sentence
    if end.by_launcher:
        return f"{start}ended by the launcher{' while it was stopped' if end.rank in stopped else ''}"
    return f"{start}{how(end)}, no message"


def how(end: Exit) -> str:
    """The end of a process: its exit code, or the signal that killed it."""
    if end.code >= 0:
        return f"exit code {end.code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-end.code, f'signal {-end.code}')}"
