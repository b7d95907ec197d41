"""A sink that works in a thread of its own, so that a slow disk or a dead server costs the training loop nothing.

The training loop puts calls into a queue, which takes microseconds. When the sink raises, one warning says so, and
it hears nothing more. When it is slower than the run, steps that find the queue full are left out, and one warning
says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import Empty, Full, Queue

from shoal.observe.ending import Ending
from shoal.observe.sink import RunStart, Sink

QUEUED = 10_000
FINISH_S = 20.0
"""The longest that the end of a run waits for what is still queued."""


class Background(Sink):
    """Passes the calls on to the sink that `open_sink` makes in the thread.

    `name` is what it is called in warnings. The thread starts with the run, and does not keep the process alive.
    """

    def __init__(
        self,
        open_sink: Callable[[], Sink],
        *,
        name: str,
        warn: Callable[[str], None],
        queued: int = QUEUED,
        finish_s: float = FINISH_S,
    ) -> None:
        self._open, self._name, self._warn, self._finish_s = open_sink, name, warn, finish_s
        self._calls: Queue[Callable[[Sink], None] | None] = Queue(queued)
        self._failure: Exception | None = None
        self._told = self._overflowed = False
        self._thread = threading.Thread(target=self._work, name=f"shoal-{name}", daemon=True)

    def start(self, run: RunStart) -> None:
        self._thread.start()
        self._put(lambda sink: sink.start(run))

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        self._put(lambda sink: sink.record(step, values, time_s=time_s))

    def warn(self, text: str) -> None:
        """Not passed on: the sink's own failures are said here, and would come back."""

    def finish(self, ending: Ending) -> None:
        """Waits until the sink has heard all, at most `finish_s`."""
        if not self._thread.is_alive() and not self._thread.ident:
            return
        self._put(lambda sink: sink.finish(ending), must=True)
        self._put(None, must=True)
        self._thread.join(self._finish_s)
        if self._thread.is_alive():
            self._say(
                f"{self._name} has not taken in the last steps after {self._finish_s:g} s: they are missing there"
            )
        self._tell()

    def _put(self, call: Callable[[Sink], None] | None, *, must: bool = False) -> None:
        self._tell()
        if self._failure is not None:
            return
        try:
            if must:
                self._calls.put(call, timeout=self._finish_s)
            else:
                self._calls.put_nowait(call)
        except Full:
            if not self._overflowed:
                self._overflowed = True
                self._say(f"{self._name} takes in steps more slowly than the run makes them: some are missing there")

    def _tell(self) -> None:
        """Says on the training thread what failed in the other one."""
        if self._failure is not None and not self._told:
            self._told = True
            self._say(f"{self._name} failed ({type(self._failure).__name__}: {self._failure}): "
                      "training goes on without it; the events have every step")  # fmt: skip

    def _say(self, text: str) -> None:
        self._warn(" ".join(text.split())[:600])

    def _work(self) -> None:
        try:
            sink = self._open()
            while (call := self._calls.get()) is not None:
                call(sink)
        except Exception as fault:
            self._failure = fault
            while True:
                try:
                    self._calls.get_nowait()
                except Empty:
                    return
