"""`Worker`: a thread that carries out calls one after the other, in the order in which they were made.

The thread holds no reference to its users, so that a group that is dropped can be collected; calls that were made are
carried out first. After an error it closes what the calls work on, so that the peers learn of it at once, and every
later call fails with the same error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.board import AT_WORK
from shoal.comm.c10d_forms import SmallWorks, readable
from shoal.comm.seam_work import FutureThreads, complete


class QueuedWork(dist.Work):
    """A call under way, in the shape of c10d's `Work`. `outputs` are the tensors that it writes."""

    def __init__(
        self, run: Callable[[], None], what: str, outputs: Sequence[Tensor], futures: FutureThreads,
        timeout_s: float | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._run: Callable[[], None] | None = run
        self._what, self._outputs, self._futures, self._timeout_s = what, list(outputs), futures, timeout_s
        self._done = threading.Event()
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks, without the interpreter lock. Raises what went wrong, or `RuntimeError` after `timeout`."""
        limit_s = timeout.total_seconds() if timeout else self._timeout_s  # c10d says zero where it means none
        if not self._done.wait(limit_s):
            raise RuntimeError(f"Timed out after {limit_s:g} s waiting for {self._what}")
        if self._error is not None:
            raise self._error
        return True

    def arrive(self) -> None:
        """Blocks until the call is over, in either way."""
        self._done.wait()

    def done(self, within_s: float) -> bool:
        """Waits for so long at most; says whether the call is over, in either way."""
        return self._done.wait(within_s)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Completed with the tensors that the call writes."""
        future: torch.futures.Future = torch.futures.Future()
        if self.is_completed():
            complete(future, self)
        else:
            self._futures.complete(future, self, in_order=True)
        return readable(future, self._outputs)

    def carry_out(self, broken: Exception | None) -> Exception | None:
        """Runs unless the worker is `broken`; returns its state afterwards. Called by the worker alone."""
        try:
            if broken is None and self._run is not None:
                self._run()
        except Exception as error:  # whatever it is, it belongs to the one who waits
            broken = error
        self._run, self._error = None, broken  # the tensors are the caller's again
        self._done.set()
        return broken


class Worker:
    """Ends when it is closed or dropped. `close`, called once, must refer to no user of the worker either.

    `goes_on`: an error is that of its call alone.
    """

    def __init__(self, close: Callable[[], object], *, name: str, goes_on: bool = False) -> None:
        self._calls: SimpleQueue[QueuedWork | None] = SimpleQueue()
        self._futures, self._small = FutureThreads(), SmallWorks()
        self._failed: list[Exception] = []  # the first, shared with the thread
        arguments = (self._calls, close, goes_on, self._failed)
        self._thread = threading.Thread(target=_work_off, args=arguments, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._calls, self._futures)
        self._end.atexit = False  # the kernel tidies up after a process

    def do(
        self, run: Callable[[], None], *, what: str, outputs: Sequence[Tensor] = (), timeout_s: float | None = None
    ) -> Any:
        """Returns at once. `timeout_s`: the most that its `wait` takes. Raises `RuntimeError` after its end."""
        if not self._end.alive or AT_WORK.closed:
            raise RuntimeError("this group is closed")
        work = QueuedWork(run, what, outputs, self._futures, timeout_s)
        self._calls.put(work)
        self._small.keep(work, outputs)
        return work

    @property
    def failure(self) -> Exception | None:
        """What every call fails with from now on; None while all is well, and always where it `goes_on`."""
        return self._failed[0] if self._failed else None

    @property
    def pending(self) -> int:
        """Calls that the thread has not begun."""
        return self._calls.qsize()

    def close(self) -> None:
        """Ends the thread when the calls that were made are done."""
        self._end()
        if not AT_WORK.closed:
            self._thread.join()


def _end(calls: SimpleQueue[QueuedWork | None], futures: FutureThreads) -> None:
    """Threads end when what was begun is over."""
    calls.put(None)
    futures.close()


def _work_off(
    calls: SimpleQueue[QueuedWork | None], close: Callable[[], object], goes_on: bool, failed: list[Exception]
) -> None:
    """The thread's main: until `None` comes."""
    broken: Exception | None = None
    with torch.no_grad():
        while (call := calls.get()) is not None:
            with AT_WORK:
                before, broken = broken, call.carry_out(broken)
                del call  # an idle thread keeps no tensor alive
                if goes_on:
                    broken = None
                if broken is not None and broken is not before:
                    failed.append(broken)
                    close()
    with AT_WORK:
        if broken is None:
            close()
