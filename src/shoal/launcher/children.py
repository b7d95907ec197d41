"""Commands that a command has started and waits for: Ctrl-C ends them, and only then the one that waits.

A terminal sends Ctrl-C to all of them, a script may send it to the waiting one alone: so they are told again, with
SIGTERM, which schedulers' starters pass on. A launcher takes both for one request (`shoal.launcher.signals`).
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
