"""The thread that carries out a group's calls, in the order in which they were made.

It refers to no group, so that a group that is dropped can be collected; a `None` in its queue ends it. After an error
it closes the transport, so that the peers learn at once, and answers every later call with the same sentence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch


class ShmWork:
    """A call under way, in the shape of c10d's `Work`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self._error: str | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks, without the interpreter lock. Raises `RuntimeError` with what went wrong, or after `timeout`."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"Timed out after {timeout} waiting for an all-reduce through shared memory")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def carry_out(self, broken: str | None) -> str | None:
        """Runs unless the group is `broken`; returns the group's state afterwards. Called by the worker alone."""
        try:
            if broken is None and self._run is not None:
                self._run()
        except Exception as error:  # whatever it is, it belongs to the one who waits
            broken = str(error) or type(error).__name__
        self._run, self._error = None, broken  # the tensors are the caller's again
        self._done.set()
        return broken


def work_off(calls: SimpleQueue[ShmWork | None], close: Callable[[], None]) -> None:
    """The thread's main: until `None` comes."""
    broken: str | None = None
    with torch.no_grad():
        while (call := calls.get()) is not None:
            broken = call.carry_out(broken)
            del call  # an idle thread keeps no tensor alive
            if broken is not None:
                close()
    close()
