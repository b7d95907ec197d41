"""Commands that a command has started and waits for: Ctrl-C ends them, and only then the one that waits.

A terminal sends Ctrl-C to all of them, a script may send it to the waiting one alone: so they are told again, with
SIGTERM, which schedulers' starters pass on. A launcher takes both for one request (`shoal.launcher.signals`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from shoal.errors import EnvironmentFault

THROWN_AWAY_S = 1.0
"""How long a run whose results nobody wants may take for its end before it is told to stop at once."""
AT_ONCE_S = 5.0
"""How long a command that was told to stop at once may take."""


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is under way as Ctrl-C does; where it is ignored, and outside the main thread, nothing is
    changed.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for(process: subprocess.Popen[Any], *, patience_s: float | None = None) -> int:
    """The exit code of a command, negative for a signal. At Ctrl-C it is stopped, as by `stop`, and
    `KeyboardInterrupt` goes on its way."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        stop([process], patience_s=patience_s)
        raise


def stop(processes: Sequence[subprocess.Popen[Any]], *, patience_s: float | None = None) -> None:
    """Tells commands to save and stop, and waits until they have.

    After `patience_s` seconds (None: without limit), or at another Ctrl-C, they are told to stop at once, and
    those that do not are killed.
    """
    for number, within_s in ((signal.SIGTERM, patience_s), (signal.SIGTERM, AT_ONCE_S), (signal.SIGKILL, None)):
        for process in processes:
            process.send_signal(number)  # does nothing where it has ended
        try:
            _wait_all(processes, within_s)
            return
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            continue


def _wait_all(processes: Sequence[subprocess.Popen[Any]], within_s: float | None) -> None:
    end_s = None if within_s is None else time.monotonic() + within_s
    for process in processes:
        process.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))


# No rank outlives its launcher, however the launcher dies: two independent guards.
#
# The kernel's, on Linux: `prctl(PR_SET_PDEATHSIG, SIGKILL)`, which ends even a rank that is stopped. It is armed
# between fork and exec, and so holds before Python has started; and once more in the rank, as a command before it
# (`HostEntry`) may have lost it. The pipe's, everywhere, is armed in the rank: the launcher alone holds the write end,
# so the read end reports end-of-file when the launcher is gone, and a thread that waits for that ends the rank.


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
