"""Processes of a job that is struck: which there are, in which state, how their connections are cut, who is left.

A process belongs to the job whose mark its environment carries in the variable `MARK`, whoever its parent is now.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from tests.programs import environ_of

MARK = "RANDOM_FAULTS_SIDE"
GRACE_S, POLL_S = 3.0, 0.02
_PIDFD_GETFD = 438
"""Its number on all architectures of Linux 5.6 and newer (pidfd_getfd(2)); Python has no name for it."""


def environ_at(pid: int) -> dict[str, str]:
    """The environment that a process began with; empty where it has ended, or has only just been forked."""
    with suppress(OSError, ValueError):
        return environ_of(pid)
    return {}


def children_of(pid: int) -> list[int]:
    """Those that it has now; none where it has ended."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def ranks_of(launcher: int) -> list[int]:
    """The launcher's children that are ranks."""
    return [pid for pid in children_of(launcher) if "LOCAL_RANK" in environ_at(pid)]


def state_of(pid: int) -> str:
    """The letter of proc(5): "T" and "t" are stopped, "Z" and "X" dead; so is what is not there."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def marked(mark: str) -> list[int]:
    """The living processes of the job, stopped ones among them."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [pid for pid in pids if environ_at(pid).get(MARK) == mark and state_of(pid) not in "ZX"]


def end_orphans(mark: str) -> int:
    """Kills the processes that are left of a job after some seconds; how many there were."""
    deadline_s = time.monotonic() + GRACE_S
    while (left := marked(mark)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def cut_connections(pid: int) -> int:
    """Ends the TCP connections of another process, as a network that resets them does; how many there were.

    Both ends see the end of the stream. Needs the right to trace the process (pidfd_getfd(2)).
    """
    cut = 0
    with suppress(ProcessLookupError, FileNotFoundError):
        handle = os.pidfd_open(pid)
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                cut += _cut(handle, int(descriptor))
        finally:
            os.close(handle)
    return cut


def _cut(handle: int, descriptor: int) -> bool:
    copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, handle, descriptor, 0)
    if copy < 0:
        return False
    try:
        if not os.readlink(f"/proc/self/fd/{copy}").startswith("socket:"):
            return False
        with socket.socket(fileno=os.dup(copy)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return False
            connection.getpeername()  # a listening socket has no peer
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False
    finally:
        os.close(copy)
