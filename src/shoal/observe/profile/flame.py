"""A flame graph of this process's Python and native frames by py-spy, an outside sampler (extra `profile`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

from shoal.errors import EnvironmentFault, MissingExtra

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
