"""No rank outlives its launcher, however the launcher dies.

Two independent guards, both armed in the rank. The kernel's, on Linux: `prctl(PR_SET_PDEATHSIG, SIGKILL)`, which ends
even a rank that is stopped. The pipe's, everywhere: the launcher alone holds the write end, so the read end reports
end-of-file when the launcher is gone, and a thread that waits for that ends the rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Mapping

from shoal.errors import EnvironmentFault

LAUNCHER_PID = "SHOAL_LAUNCHER_PID"
LAUNCHER_PIPE = "SHOAL_LAUNCHER_PIPE"
_PR_SET_PDEATHSIG = 1


def die_with_parent(environ: Mapping[str, str]) -> None:
    """Arm both guards in a rank that Shoal's launcher started. Raises `EnvironmentFault` where the kernel refuses."""
    launcher_pid = int(environ[LAUNCHER_PID])
    if sys.platform == "linux":
        _ask_kernel()
    _watch(int(environ[LAUNCHER_PIPE]))
    # The launcher may have died before the guard was armed: then a foster parent adopted this process.
    if os.getppid() != launcher_pid:
        _end()


def _ask_kernel() -> None:
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
