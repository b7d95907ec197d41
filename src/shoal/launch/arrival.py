"""Ranks that hang while they start. Nobody waits for them yet, or all hang alike, so that nobody would ever say so.

A rank leaves a file in the launcher's folder when it has come so far that every wait has a limit of its own: after its
imports, and where replicas join one by one, when it is ready to join. One that has not after `run.start_timeout_s` gets
SIGABRT: Python then prints where it is (`PYTHONFAULTHANDLER`), which names the line, and SIGKILL after `DUMP_S`.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import EnvironmentFault
from shoal.launch.failure import FAILURE_FOLDER, Failure
from shoal.launch.rank_process import RankProcess

DUMP_S = 2.0
"""What a rank may take to print where it is."""
_FRAME = re.compile(r'^  File "(?P<file>[^<"][^"]*)", line (?P<line>\d+)', re.MULTILINE)
_NEWEST_FIRST = "(most recent call first)"


def say_arrived(environ: Mapping[str, str], *, replica: str = "") -> None:
    """This rank, of `replica` in an elastic run, has started. Under another launcher than Shoal's nobody asks."""
    if folder := environ.get(FAILURE_FOLDER):
        _mark(Path(folder), replica, int(environ["RANK"])).touch()


def has_arrived(folder: Path, process: RankProcess, *, replica: str = "") -> bool:
    """Whether the rank has said so, in the launcher's `folder`."""
    return _mark(folder, replica, process.rank).exists()


def failure_of_late(process: RankProcess, *, start_s: float, stopped: bool) -> Failure:
    """The record of a rank that had not started after `start_s` seconds, once it has printed where it was, or was
    `stopped`.
    """
    found = place_in(process.log_tail())
    place = "its log says where it was" if process.log is not None else "it printed above where it was"
    if found is not None:
        place = f"it was at {found}"
    if stopped:
        place = "it was stopped (SIGSTOP)"
    message = (
        f"rank {process.rank} had not started after {start_s:g} s (run.start_timeout_s): {place}; look what it waits "
        "for there, such as a file system, a lock or the network"
    )
    return Failure(
        rank=process.rank,
        host=socket.gethostname(),
        pid=process.pid,
        time_ns=time.time_ns(),
        exit_code=EnvironmentFault.exit_code,
        kind=EnvironmentFault.__name__,
        message=message,
    )


def place_in(log: str) -> str | None:
    """File and line of the innermost frame with a file in the last stack that `faulthandler` has printed; None without
    one. The main thread's stack is the last.
    """
    _, found, stack = log.rpartition(_NEWEST_FIRST)
    frame = _FRAME.search(stack) if found else None
    return None if frame is None else f"{frame['file']}:{frame['line']}"


def _mark(folder: Path, replica: str, rank: int) -> Path:
    return folder / f"arrived-{replica}-{rank}"
