"""What the launcher says when ranks failed: the cause, whole, then a line for every other rank. For example:

rank 1 of 2 failed (host tuna, pid 4711, exit code 1):
Traceback (most recent call last): ...

rank 0 (pid 4710): CollectiveError: all_reduce lost rank 1
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Collection, Mapping, Sequence

from shoal.launch.root_cause import End, Exit

_SIGKILL_HINT = "the launcher did not send it; where memory runs out the kernel does: see `dmesg`, or use less of it"


def failure_report(
    ends: Sequence[End], exits: Sequence[Exit], *, stopped: Mapping[int, int], log_tails: Mapping[int, str]
) -> str:
    """The report's text. `ends`: failed ranks, the cause first; `stopped`: pid by rank, of those held by SIGSTOP."""
    cause = ends[0]
    held = [f"rank {rank} (pid {pid}) is stopped (SIGSTOP); kill -CONT lets it go on" for rank, pid in stopped.items()]
    headline = _headline(cause, len(exits), log_tails.get(cause.exit.rank, ""))
    # Where all the failed ranks only lost a peer, a rank that is held is the peer that they lost.
    lines = [headline, *held] if cause.primary else [*held, headline]
    failures = {end.exit.rank: end for end in ends}
    others = sorted((end for end in exits if end.rank != cause.exit.rank), key=lambda end: end.rank)
    return "\n".join([*lines, *(_line(end, failures.get(end.rank), stopped) for end in others)])


def _headline(end: End, world_size: int, log_tail: str) -> str:
    host = end.failure.host if end.failure else socket.gethostname()
    first = f"rank {end.exit.rank} of {world_size} failed (host {host}, pid {end.exit.pid}, {_how(end.exit)})"
    return f"{first}:\n{_words(end, log_tail)}"


def _words(end: End, log_tail: str) -> str:
    if end.failure is not None:
        return end.failure.text
    if end.exit.ours:
        return "it did not end by itself in time, and the launcher ended it"
    hint = [_SIGKILL_HINT] if end.exit.code == -signal.SIGKILL else []
    return "\n".join([*hint, *([f"the end of its log:\n{log_tail}"] if log_tail else [])]) or "it left no message"


def _line(end: Exit, failed: End | None, stopped: Collection[int]) -> str:
    start = f"rank {end.rank} (pid {end.pid}): "
    if failed is None:
        return start + ("finished" if end.code == 0 else "stopped after a good checkpoint")
    if failed.failure is not None:
        first_line = failed.failure.message.strip().partition("\n")[0]
        return f"{start}{failed.failure.kind}: {first_line}"
    if end.ours:
        return f"{start}ended by the launcher{' while it was stopped' if end.rank in stopped else ''}"
    return f"{start}{_how(end)}, no message"


def _how(end: Exit) -> str:
    if end.code >= 0:
        return f"exit code {end.code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-end.code, f'signal {-end.code}')}"
