"""`AT_WORK`: what daemon threads do in there is done before the interpreter ends.

When it ends, a daemon thread that comes back from code without the interpreter lock is unwound where it stands. In C++
(a future that is completed, a group that is dropped) that aborts the process: "terminate called without an active
exception". So the end waits until threads are out of there, and keeps them out.
"""

from __future__ import annotations

import atexit
import os
import threading

PATIENCE_S = 2.0
"""What the interpreter's end waits for all of them together: one may wait for a peer that does not come."""


class _Gate:
    """A context that many threads are in at a time, and none any more after `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self.closed = 0, False

    def __enter__(self) -> None:
        with self._changed:
            while self.closed:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """At the interpreter's end. Waits for those inside, and for so long at most."""
        with self._changed:
            self.closed = True
            self._changed.wait_for(lambda: self._inside == 0, PATIENCE_S)

    def reopen(self) -> None:
        """In a child that was forked: the threads are its parent's."""
        self.__init__()


AT_WORK = _Gate()
atexit.register(AT_WORK.close)
os.register_at_fork(after_in_child=AT_WORK.reopen)
