"""`SeamWork`: a collective under way behind the seam, and `Booking`, its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.at_work import AT_WORK
from shoal.comm.ledger import Ledger
from shoal.errors import CollectiveError

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
        due_s: float = 0.0, finish: Callable[[], object],
    ) -> None:  # fmt: skip
        super().__init__()
        self._inner = inner
        self._booking = Booking(
            operation=operation, ledger=ledger, explain=explain, results=results, due_s=due_s, finish=finish
        )

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
