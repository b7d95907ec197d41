"""One timeline of all ranks in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

A rank is a process; its threads are rows, and so are its steps, its collectives and each stream of a GPU. An arrow
joins a collective on the rank that came last with the same one on the others, and a message from its sender to its
receiver. Times are microseconds of rank 0's clock. (Trace Event Format, Google, 2016.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Any

from shoal.errors import EnvironmentFault, MissingExtra
from shoal.observe.profile.recording import Joined, Recording, joined

STEPS, WAITS, CALLS, HOST, STREAMS = 0, 1, 2, 1_000, 1_000_000
"""Rows of a rank: its steps, where it stands still, its collectives; then its threads, and the streams of its GPU."""
_MICRO = 1e6
_LANES = 100
"""Collectives that run at once have rows of their own, up to this many."""


def trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The whole file as plain values."""
    events = [event for recording in recordings for event in (*_headings(recording), *_rows(recording))]
    lanes = {(recording.rank, key): row for recording in recordings for key, row in _lanes(recording).items()}
    for number, call in enumerate(joined(recordings).values()):
        events += _arrows(number, call, lanes)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _headings(recording: Recording) -> Iterator[dict[str, Any]]:
    rank = recording.rank
    yield _named("process_name", rank, None, f"rank {rank} on {recording.host}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    yield _named("thread_name", rank, STEPS, "steps")
    yield _named("thread_name", rank, WAITS, "stands still")
    for row in sorted(set(_lanes(recording).values())):
        yield _named("thread_name", rank, row, "collectives")
    for row, name in sorted({_row(piece.device, piece.thread, recording.thread) for piece in recording.slices}):
        yield _named("thread_name", rank, row, name)


def _rows(recording: Recording) -> Iterator[dict[str, Any]]:
    rank, lanes = recording.rank, _lanes(recording)
    for step in recording.steps:
        yield _slice(f"step {step.number}", "step", rank, STEPS, step.begin_s, step.end_s)
        yield _slice("waiting for data", "data", rank, WAITS, step.begin_s, step.data_s)
    for wait in recording.waits:
        yield _slice(wait.operation, "wait", rank, WAITS, wait.begin_s, wait.end_s)
    for call in recording.calls:
        told = {"key": call.key, "ranks": call.ranks, "sent_bytes": call.sent_bytes}
        yield _slice(call.operation, "collective", rank, lanes[call.key], call.begin_s, call.end_s) | {"args": told}
    for piece in recording.slices:
        row, _ = _row(piece.device, piece.thread, recording.thread)
        yield _slice(piece.name, "operator" if piece.device < 0 else "kernel", rank, row, piece.begin_s, piece.end_s)


def _arrows(number: int, call: Joined, lanes: dict[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    """From the sender of a message, or from the rank that came last, to the others."""
    came = dict(call.calls)
    source = next((rank for rank, own in call.calls if own.operation == "send"), call.last[0])
    begin_s = max(own.begin_s for own in came.values())
    for target, own in call.calls:
        if target == source:
            continue
        common = {"cat": "collective", "name": call.operation, "id": f"{number}-{target}"}
        yield common | {
            "ph": "s", "pid": source, "tid": lanes[source, call.key], "ts": _micros(came[source].begin_s)
        }  # fmt: skip
        inside_s = min(max(begin_s, own.begin_s), own.end_s)
        yield common | {
            "ph": "f", "bp": "e", "pid": target, "tid": lanes[target, call.key], "ts": _micros(inside_s)
        }  # fmt: skip


def _lanes(recording: Recording) -> dict[str, int]:
    """The row of each call: the first in which no other call runs at that time."""
    free_s: list[float] = []
    rows: dict[str, int] = {}
    for call in sorted(recording.calls, key=lambda call: call.begin_s):
        lane = next((lane for lane, end_s in enumerate(free_s) if end_s <= call.begin_s), len(free_s))
        lane = min(lane, _LANES - 1)
        free_s[lane : lane + 1] = [call.end_s]
        rows[call.key] = CALLS + lane
    return rows


def _row(device: int, thread: int, trains: int) -> tuple[int, str]:
    if device >= 0:
        return STREAMS * (device + 1) + thread, f"GPU {device}, stream {thread}"
    return HOST + thread, "thread that trains" if thread == trains else f"thread {thread}"


def _slice(name: str, kind: str, rank: int, row: int, begin_s: float, end_s: float) -> dict[str, Any]:
    begin, end = _micros(begin_s), _micros(end_s)
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": row, "ts": begin, "dur": round(end - begin, 3)}


def _named(what: str, rank: int, row: int | None, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "args": {"name": name}} | ({} if row is None else {"tid": row})


def _micros(seconds: float) -> float:
    return round(seconds * _MICRO, 3)


# A flame graph of this process's Python and native frames by py-spy, an outside sampler (extra `profile`).


STARTED = "Sampling process"
STARTING_S, ENDING_S = 30.0, 60.0
_PR_SET_PTRACER = 0x59616D61


def flame_program() -> str:
    """Where py-spy is. Raises `MissingExtra`."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise MissingExtra("py-spy", extra="profile", purpose="a flame graph")
    return found


@contextlib.contextmanager
def flame_graph(path: Path) -> Iterator[None]:
    """Writes the flame graph (SVG) of what this process does within. Raises `EnvironmentFault` where it may not."""
    command = [flame_program(), "record", "--pid", str(os.getpid()), "--output", str(path), "--rate", "200"]
    # It has said that it has started on either stream, by version.
    sampler = subprocess.Popen([*command, "--threads"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        _let_look(sampler.pid)
        said = _until_started(sampler)
        yield
        sampler.send_signal(signal.SIGINT)
        said += sampler.communicate(timeout=ENDING_S)[0]
        if not path.is_file():
            raise EnvironmentFault(_why_not(said))
    finally:
        if sampler.poll() is None:
            sampler.kill()
        sampler.wait()


def _until_started(sampler: subprocess.Popen[str]) -> str:
    said, stream = "", sampler.stdout
    assert stream is not None
    patience = threading.Timer(STARTING_S, sampler.kill)
    patience.start()
    try:
        for line in stream:
            said += line
            if STARTED in line:
                return said
    finally:
        patience.cancel()
    raise EnvironmentFault(_why_not(said))


def _why_not(said: str) -> str:
    last = next((line for line in reversed(said.strip().splitlines()) if line.strip()), "it said nothing")
    return (
        f"py-spy could not sample this process ({last.strip()}): it needs the right to trace, which containers give by "
        "--cap-add SYS_PTRACE; or leave --flame out"
    )


def _let_look(pid: int) -> None:
    """Linux lets a process trace its children alone, unless its target says otherwise (Yama)."""
    if sys.platform == "linux":
        CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)
