"""No rank outlives its launcher, however the launcher dies: two independent guards.

    kernel   on Linux: `prctl(PR_SET_PDEATHSIG, SIGKILL)`, which ends even a rank that is stopped
    pipe     everywhere: the launcher alone holds the write end, so the read end reports end-of-file when the launcher
             is gone, and a thread of the rank that waits for that ends it

The kernel's guard is armed between fork and exec, and so holds before Python has started. It is armed once more in the
rank, as a command before it (`HostEntry`) may have lost it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping

from shoal.errors import EnvironmentFault

LAUNCHER_PID = "SHOAL_LAUNCHER_PID"
LAUNCHER_PIPE = "SHOAL_LAUNCHER_PIPE"
_PR_SET_PDEATHSIG = 1


def arm_before_exec() -> Callable[[], None] | None:
    """What a child does between fork and exec: the kernel ends it with the thread that started it. None where the
    kernel has no such guard.

    Other threads of this process may hold locks that the child finds locked for ever. So everything is looked up here,
    and the child makes system calls alone.
    """
    if sys.platform != "linux":
        return None
    prctl, launcher = ctypes.CDLL(None).prctl, os.getpid()
    arguments = (ctypes.c_int(_PR_SET_PDEATHSIG), *(ctypes.c_ulong(n) for n in (signal.SIGKILL, 0, 0, 0)))
    getppid, leave = os.getppid, os._exit

    def arm() -> None:
        prctl(*arguments)  # where the kernel refuses, the rank says so when it arms the guard again
        if getppid() != launcher:  # it died before the guard was armed
            leave(1)

    return arm


def die_with_parent(environ: Mapping[str, str]) -> None:
    """Arm both guards in a rank that Shoal's launcher started. Raises `EnvironmentFault` where the kernel refuses."""
    launcher_pid = int(environ[LAUNCHER_PID])
    if sys.platform == "linux":
        ask_kernel()
    _watch(int(environ[LAUNCHER_PIPE]))
    # The launcher may have died before the guard was armed: then a foster parent adopted this process.
    if os.getppid() != launcher_pid:
        _end()


def ask_kernel() -> None:
    """Have the kernel end this process with the thread that started it. Raises `EnvironmentFault` where it refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise EnvironmentFault(f"the kernel refused PR_SET_PDEATHSIG ({reason}): ranks must not outlive their launcher")


def _watch(read_end: int) -> None:
    def wait() -> None:
        while os.read(read_end, 1):
            pass
        _end()

    threading.Thread(target=wait, name="shoal-launcher-watch", daemon=True).start()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
