"""Collectives that were called and are not yet known to be the same on all ranks, in the order of the calls.

Whoever waits for one goes on with all before it. A thread does so for those that nobody has waited for within some
milliseconds: a rank may start a collective, and then wait for something else that depends on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from shoal.comm.comparison import Comparison
from shoal.comm.waiting import LOOK_S, waited

GRACE_S = 0.005
"""After which the thread takes over."""


class Call:
    """`launch` makes the collective, when all ranks are known to have called the same; its work is `made`."""

    def __init__(self, comparison: Comparison, launch: Callable[[], Any]) -> None:
        self.comparison, self._launch = comparison, launch
        self.made: Any = None
        self.judged = False
        self.posted_s = time.monotonic()

    def go_on(self) -> None:
        """Waits for the other ranks; raises `CollectiveError` where they differ."""
        self.comparison.judge()
        self.made = self._launch()
        self.judged = True


class Pending:
    """The calls of one group. Its thread ends with those who hold it; what is pending then is made first."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._lock, self._posted = threading.Lock(), threading.Event()
        self._error: Exception | None = None
        thread = threading.Thread(target=_take_over, args=(weakref.ref(self), self._posted), name="shoal-check")
        thread.daemon = True
        thread.start()
        weakref.finalize(self, self._posted.set).atexit = False

    def add(self, call: Call) -> None:
        """The newest call."""
        self._calls.append(call)
        self._posted.set()

    def finish(self, call: Call, look: Callable[[], None] | None) -> None:
        """Returns when `call` was made. `look` is called now and then while other ranks are waited for.

        Raises what is wrong with it, or with one before it.
        """
        while not call.judged:
            if not self._lock.acquire(timeout=LOOK_S):
                if look is not None:
                    look()
                continue
            try:
                self._go_on(call, look)
            finally:
                self._lock.release()

    def advance(self) -> None:
        """Goes on as far as nobody has to be waited for."""
        if self._calls and self._lock.acquire(blocking=False):
            try:
                self._go_on_while_arrived()
            finally:
                self._lock.release()

    def take_over(self) -> bool:
        """Goes on with what has been pending for too long; whether anything is pending still."""
        with contextlib.suppress(IndexError):  # the one who waits was faster
            if time.monotonic() - self._calls[0].posted_s > GRACE_S:
                self.advance()
        return bool(self._calls) and self._error is None

    def _go_on(self, last: Call, look: Callable[[], None] | None) -> None:
        while not last.judged:
            if self._error is not None:
                raise self._error
            self._await(self._calls[0], look)
            self._first()

    def _go_on_while_arrived(self) -> None:
        while self._error is None and self._calls and self._calls[0].comparison.arrived():
            try:
                self._first()
            except Exception:  # kept for the one who waits
                return

    def _first(self) -> None:
        try:
            self._calls[0].go_on()
        except Exception as error:
            self._error = error
            raise
        self._calls.popleft()

    def _await(self, call: Call, look: Callable[[], None] | None) -> None:
        """Until all ranks have come to `call`, if there is a look to take meanwhile."""
        while look is not None and not waited(call.comparison.work, LOOK_S):
            look()


def _take_over(pending: weakref.ref[Pending], posted: threading.Event) -> None:
    """The thread's main. It holds what it works on while something is pending, and ends with it."""
    while posted.wait():
        posted.clear()
        mine = pending()
        if mine is None:
            return
        time.sleep(GRACE_S)
        while mine.take_over():
            time.sleep(GRACE_S)
        del mine
