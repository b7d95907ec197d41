"""A rank's answer to SIGTERM and SIGINT: before training, end at once; in training, stop after the step.

    with end_at_once():
        set_up()
        with StopRequest() as stop:
            while not stop.requested:
                step()

Before the first step there is nothing to save, and the kernel's own answer works even inside a call into C++ that waits
for another rank. In training, a second request ends the process at once. Terminals, launchers and cluster agents often
deliver one request twice, a few milliseconds apart: signals within `SAME_REQUEST_S` of a request are the same one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SAME_REQUEST_S = 0.3
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def end_at_once() -> Iterator[None]:
    """SIGINT and SIGTERM end the process without running any Python; one that is ignored (`nohup`) stays so.

    Outside the main thread, where Python sets no handlers, nothing changes.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        chosen = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, signal.SIG_DFL) for number in chosen}
    try:
        yield
    finally:
        _restore(before, signal.SIG_DFL)


class Debounce:
    """Tells requests in a stream of signals: those within `SAME_REQUEST_S` of the last request belong to it. So keys
    that are pressed again and again, however fast, are several.
    """

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def request(self, now_s: float) -> bool:
        """Whether a signal at `now_s` (any monotonic seconds) is a new request."""
        new = now_s - self._last_s > SAME_REQUEST_S
        if new:
            self._last_s = now_s
        return new


class StopRequest:
    """Notes the first SIGTERM or SIGINT; ends the process with 128 + n at the second. Main thread only, but `ask`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, end: Callable[[int], Any] = os._exit) -> None:
        self.signal: signal.Signals | None = None
        self._clock = clock
        self._end = end
        self._asked = False
        self._debounce = Debounce()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop has been asked for; `signal` says by which signal, if by one."""
        return self._asked or self.signal is not None

    def ask(self) -> None:
        """Asks for a stop without a signal; the first signal that follows is the first still. From any thread."""
        self._asked = True

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopRequest was entered outside the main thread: Python runs handlers only there")
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._debounce.request(self._clock()):
            return
        if self.signal is not None:
            # os._exit: asked twice means now, whatever thread or C++ teardown would hold a normal exit.
            self._end(128 + number)
        self.signal = signal.Signals(number)


def end_with(code: int) -> None:
    """SIGINT and SIGTERM end the process with `code` from here on: its work is done, and only its teardown is left.

    It holds beyond the end of an `end_at_once` or a `StopRequest` around it. Outside the main thread, where Python sets
    no handlers, nothing changes.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: os._exit(code))


def _restore(before: dict[signal.Signals, Any], own: Any) -> None:
    """Puts back what was there `before` our `own` handlers, unless `end_with` has set another meanwhile."""
    while before:
        number, handler = before.popitem()
        if signal.getsignal(number) == own:
            # None: a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
