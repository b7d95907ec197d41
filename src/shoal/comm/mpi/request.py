"""`MpiWork`: a call under way in MPI.

MPI makes progress while it is asked how far it is. The one who waits asks, spins briefly, and then sleeps for longer
and longer between two questions, because ranks may outnumber cores; MPI's own wait would keep a core busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SPINS = 200
FIRST_SLEEP_S, LONGEST_SLEEP_S = 10e-6, 500e-6


class MpiWork(dist.Work):
    """`outputs` are the tensors that the call writes; `held` are all that must live until it is over; then `finish`."""

    def __init__(
        self, request: Any, *, what: str, timeout_s: float, outputs: Sequence[Tensor], held: object,
        finish: Sequence[Callable[[], object]],
    ) -> None:  # fmt: skip
        super().__init__()
        self._request, self._what, self._timeout_s = request, what, timeout_s
        self._outputs, self._held, self._finish = list(outputs), held, list(finish)
        self._over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises `RuntimeError` with what went wrong, or after the timeout."""
        limit_s = timeout.total_seconds() if timeout else self._timeout_s  # c10d says zero where it means none
        until_s, spins, sleep_s = time.monotonic() + limit_s, SPINS, FIRST_SLEEP_S
        while not self.is_completed():
            if spins > 0:
                spins -= 1
                os.sched_yield()
                continue
            if time.monotonic() >= until_s:
                raise RuntimeError(f"Timed out after {limit_s:g} s waiting for {self._what} over MPI")
            time.sleep(sleep_s)
            sleep_s = min(LONGEST_SLEEP_S, 2 * sleep_s)
        return True

    def is_completed(self) -> bool:
        """Also goes on with the call."""
        if not self._over and self._request.Test():
            self._over = True
            for finish in self._finish:
                finish()
            self._held, self._finish = None, []  # the tensors are the caller's again
        return self._over

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Completed with the tensors that the call wrote; waits for them."""
        future: torch.futures.Future = torch.futures.Future()
        self.wait()
        future.set_result(self._outputs)
        return future
