"""`AtWork`: what a daemon thread does in there is done before the interpreter ends.

When it ends, a daemon thread that comes back from code without the interpreter lock is unwound where it stands. In C++
(a future that is completed, a group that is dropped) that aborts the process: "terminate called without an active
exception". So the end waits until threads are out of there, and keeps them out.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

PATIENCE_S = 2.0
"""What the interpreter's end waits for all of them together: one may wait for a peer that does not come."""


class AtWork:
    """A context that one thread enters again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _ALL.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def end(self, within_s: float) -> bool:
        """Nobody enters any more. False: somebody has been in there for so long."""
        return self._lock.acquire(timeout=max(0.0, within_s))


_ALL: weakref.WeakSet[AtWork] = weakref.WeakSet()


def _end_all() -> None:
    until_s = time.monotonic() + PATIENCE_S
    for one in list(_ALL):
        one.end(until_s - time.monotonic())


atexit.register(_end_all)
os.register_at_fork(after_in_child=_ALL.clear)  # the threads are the parent's
