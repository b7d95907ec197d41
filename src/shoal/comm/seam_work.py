"""Calls under way behind the seam, and how c10d's futures of them are completed.

`SeamWork` is the work of one call; `Booking` is its end: whoever sees it first books the call in the ledger, once.

`FutureThreads` complete futures behind the caller's back. Like the core's own threads they have their share of a core,
but do not interrupt the thread that computes there each time they are woken (SCHED_BATCH). That took an all-reduce of
1.3 MB over 2 ranks from 0.75 to 0.64 ms; beside a computation of 15 ms, one of 19 MB ended 0.4 ms earlier.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.board import AT_WORK
from shoal.comm.ledger import Ledger
from shoal.errors import CollectiveError


class Ending(Protocol):
    """A work, as its future sees it."""

    def arrive(self) -> None:
        """Blocks until nothing more is to come, outside of C++."""
        ...

    def wait(self) -> bool:
        """What is still to do, at once. Raises what went wrong."""
        ...

    def result(self) -> list[Tensor]: ...


_Asked = tuple[torch.futures.Future, Ending]


def complete(future: torch.futures.Future, work: Ending) -> None:
    """Says in `future` how `work`, which has arrived, went."""
    try:
        work.wait()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(work.result())


class FutureThreads:
    """Complete futures: of works that end in the order in which they were made, or in any, each by its own thread.

    One thread waits for works; while it completes a future, whose callbacks may make calls and wait for their futures,
    another one does.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._waits, self._count = threading.Lock(), threading.Lock()
        self._idle, self._closed = 0, False

    def complete(self, future: torch.futures.Future, work: Ending, *, in_order: bool) -> None:
        """`in_order`: not before those that were asked for earlier."""
        with self._count:
            in_turn = in_order and not self._closed
            if in_turn:
                self._asked.put((future, work))
        if in_turn:
            self._follow()
        else:
            _start(_complete_alone, future, work)

    def close(self) -> None:
        """Returns at once; futures that were asked for are still completed."""
        with self._count:
            self._closed = True
            self._asked.put(None)

    def _follow(self) -> None:
        """Sees to it that a thread takes what is asked for next, though this one may be kept by a callback."""
        with self._count:
            if self._idle == 0:
                _start(self._serve)
                self._idle = 1

    def _serve(self) -> None:
        _be_patient()
        while (pair := self._next()) is not None:
            with AT_WORK:
                complete(*pair)
                del pair  # an idle thread keeps no tensor alive
            with self._count:
                self._idle += 1

    def _next(self) -> _Asked | None:
        """The next whose work has arrived, or None at the end."""
        with self._waits:
            pair = self._asked.get()
            if pair is None:
                self._asked.put(None)  # for the other threads
                return None
            pair[1].arrive()
            with self._count:
                self._idle -= 1
        if not self._asked.empty():
            self._follow()
        return pair


def _complete_alone(future: torch.futures.Future, work: Ending) -> None:
    _be_patient()
    work.arrive()
    with AT_WORK:
        complete(future, work)


def _start(target: Callable[..., object], *args: object) -> None:
    threading.Thread(target=target, args=args, name="shoal-futures", daemon=True).start()


def _be_patient() -> None:
    """A thread with a policy of its own keeps it; where none may be chosen, this one is as any other."""
    thread = threading.get_native_id()
    with contextlib.suppress(PermissionError):
        if os.sched_getscheduler(thread) == os.SCHED_OTHER:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


Explain = Callable[[RuntimeError, float], CollectiveError]
"""From a backend's complaint and the seconds waited to the sentence that is raised."""


class Booking:
    """The end of a call, and how it stands in the ledger: whoever sees it first books it, once.

    It holds no group: a backend's thread that completes a future lets go of what the future's callbacks hold, and a
    group cannot be dropped by its own thread.
    """

    def __init__(
        self, *, operation: str, ledger: Ledger, explain: Explain, results: Sequence[Tensor], due_s: float,
        finish: Callable[[], object],
    ) -> None:  # fmt: skip
        self.operation, self.ledger, self.explain = operation, ledger, explain
        self.results, self.due_s, self._finish = list(results), due_s, finish
        self.label = ""
        self.started_s = time.perf_counter()
        self._lock, self._booked, self.done = threading.Lock(), False, False

    def claimed(self) -> bool:
        """Whether it is for the caller to book the call."""
        with self._lock:
            before, self._booked = self._booked, True
            return not before

    def given_back(self) -> None:
        """By a caller that has claimed it and saw no end."""
        self._booked = False

    def end(self) -> None:
        """What is done when the call is over, once."""
        with self._lock:
            if not self.done:
                self._finish()
            self.done = True

    def seen(self, arrived: torch.futures.Future | None) -> list[Tensor]:
        """The end, as a future sees it. Raises `CollectiveError`."""
        try:
            if arrived is not None:
                arrived.value()
        except RuntimeError as error:
            raise self.explain(error, time.perf_counter() - self.started_s) from None
        self.end()
        if self.claimed():
            self.ledger.waited(self.operation, 0.0, time.perf_counter() - self.started_s)
        return self.results

    def complete_when_due(self, over: torch.futures.Future, arrived: torch.futures.Future | None) -> None:
        """Completes `over` at `due_s`, as `arrived` was."""

        def complete() -> None:
            with AT_WORK:
                try:
                    over.set_result(self.seen(arrived))
                except CollectiveError as error:
                    over.set_exception(error)

        timer = threading.Timer(max(0.0, self.due_s - time.perf_counter()), complete)
        timer.daemon = True
        timer.start()


class SeamWork(dist.Work):
    """`inner` is the backend's work, None where there is nothing to wait for; `results` are the tensors that it writes.

    The call is over when `inner` is, and not before `due_s` of `time.perf_counter` (0: at once); then `finish` runs.
    """

    def __init__(
        self, inner: Any, *, operation: str, ledger: Ledger, explain: Explain, results: Sequence[Tensor],
        due_s: float = 0.0, finish: Callable[[], object], label: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self._inner = inner
        self._booking = Booking(
            operation=operation, ledger=ledger, explain=explain, results=results, due_s=due_s, finish=finish
        )
        self._booking.label = label

    @property
    def label(self) -> str:
        """The group in which the call was made."""
        return self._booking.label

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the call is over, and books the time as exposed. Raises `CollectiveError` naming the operation
        and the ranks that did not come."""
        booking = self._booking
        if booking.done:
            return True
        begin_s, mine = time.perf_counter(), booking.claimed()
        try:
            if self._inner is not None:  # c10d says zero where it means no timeout
                self._inner.wait(timeout) if timeout else self._inner.wait()
        except RuntimeError as error:
            if mine:
                booking.given_back()
            raise booking.explain(error, time.perf_counter() - begin_s) from None
        if booking.due_s:
            time.sleep(max(0.0, booking.due_s - time.perf_counter()))
        booking.end()
        if mine:
            booking.ledger.waited(booking.operation, time.perf_counter() - begin_s, begin_s - booking.started_s)
        return True

    def is_completed(self) -> bool:
        arrived = self._inner is None or self._inner.is_completed()
        return self._booking.done or (arrived and time.perf_counter() >= self._booking.due_s)

    def is_success(self) -> bool:
        """Over, and without an error."""
        return self.is_completed() and (self._inner is None or self._inner.is_success())

    def result(self) -> list[Tensor]:
        """The tensors that the call writes."""
        return self._booking.results

    def get_future(self) -> torch.futures.Future:
        """Completed with `result()` when the call is over. Nobody stands still for it: unless somebody waits for the
        work, too, its time is booked as hidden."""
        booking = self._booking
        if self._inner is not None and not booking.due_s:
            return self._inner.get_future().then(booking.seen)
        over: torch.futures.Future = torch.futures.Future()
        if self._inner is None:
            booking.complete_when_due(over, None)
        else:
            self._inner.get_future().add_done_callback(partial(booking.complete_when_due, over))
        return over
