"""`SeamWork`: a collective under way behind the seam; whoever sees its end first books it, once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.at_work import AT_WORK
from shoal.comm.ledger import Ledger
from shoal.errors import CollectiveError

Explain = Callable[[RuntimeError, float], CollectiveError]
"""From a backend's complaint and the seconds waited to the sentence that is raised."""


class SeamWork(dist.Work):
    """`inner` is the backend's work, None where there is nothing to wait for; `results` are the tensors that it writes.

    The call is over when `inner` is, and not before `due_s` of `time.perf_counter` (0: at once); then `finish` runs.
    """

    def __init__(
        self, inner: Any, *, operation: str, ledger: Ledger, explain: Explain, results: Sequence[Tensor],
        due_s: float = 0.0, finish: Callable[[], object],
    ) -> None:  # fmt: skip
        super().__init__()
        self._inner, self._operation, self._ledger, self._explain = inner, operation, ledger, explain
        self._results, self._due_s, self._finish = list(results), due_s, finish
        self._started_s = time.perf_counter()
        self._lock, self._booked, self._done = threading.Lock(), False, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the call is over, and books the time as exposed. Raises `CollectiveError` naming the operation
        and the ranks that did not come."""
        if self._done:
            return True
        begin_s, mine = time.perf_counter(), self._claimed()
        try:
            if self._inner is not None:  # c10d says zero where it means no timeout
                self._inner.wait(timeout) if timeout else self._inner.wait()
        except RuntimeError as error:
            if mine:
                self._booked = False
            raise self._explain(error, time.perf_counter() - begin_s) from None
        if self._due_s:
            time.sleep(max(0.0, self._due_s - time.perf_counter()))
        self._end()
        if mine:
            self._ledger.waited(self._operation, time.perf_counter() - begin_s, begin_s - self._started_s)
        return True

    def is_completed(self) -> bool:
        arrived = self._inner is None or self._inner.is_completed()
        return self._done or (arrived and time.perf_counter() >= self._due_s)

    def is_success(self) -> bool:
        """Over, and without an error."""
        return self.is_completed() and (self._inner is None or self._inner.is_success())

    def result(self) -> list[Tensor]:
        """The tensors that the call writes."""
        return self._results

    def get_future(self) -> torch.futures.Future:
        """Completed with `result()` when the call is over. Nobody stands still for it: unless somebody waits for the
        work, too, its time is booked as hidden."""
        if self._inner is not None and not self._due_s:
            return self._inner.get_future().then(self._seen)
        over: torch.futures.Future = torch.futures.Future()
        if self._inner is None:
            self._complete_when_due(over, None)
        else:
            self._inner.get_future().add_done_callback(lambda arrived: self._complete_when_due(over, arrived))
        return over

    def _complete_when_due(self, over: torch.futures.Future, arrived: torch.futures.Future | None) -> None:
        def complete() -> None:
            with AT_WORK:
                try:
                    over.set_result(self._seen(arrived))
                except CollectiveError as error:
                    over.set_exception(error)

        timer = threading.Timer(max(0.0, self._due_s - time.perf_counter()), complete)
        timer.daemon = True
        timer.start()

    def _seen(self, arrived: torch.futures.Future | None) -> list[Tensor]:
        """The end, as a future sees it. Raises as `wait` does."""
        try:
            if arrived is not None:
                arrived.value()
        except RuntimeError as error:
            raise self._explain(error, time.perf_counter() - self._started_s) from None
        self._end()
        if self._claimed():
            self._ledger.waited(self._operation, 0.0, time.perf_counter() - self._started_s)
        return self._results

    def _claimed(self) -> bool:
        """Whether it is for the caller to book the call."""
        with self._lock:
            before, self._booked = self._booked, True
            return not before

    def _end(self) -> None:
        with self._lock:
            if not self._done:
                self._finish()
            self._done = True
