"""Ranks that compare fingerprints in an exchange of their own, eight bytes a rank, before a collective is made.

Gloo ends the process where sizes differ, so that a collective has to wait for the exchange; its caller need not. With
GPUs it has to, because their streams would go on without the collective. So a collective waits until all ranks have
called it, a broadcast's root too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.comm.comparison import Comparer
from shoal.comm.disagreement import Rows
from shoal.comm.fingerprint import Fingerprint
from shoal.comm.pending import Call, Pending
from shoal.comm.waiting import Stall


class ComparedWork(dist.Work):
    """A collective whose fingerprints are being compared."""

    def __init__(self, call: Call, pending: Pending, stall: Stall | None) -> None:
        super().__init__()
        self._call, self._pending, self._stall = call, pending, stall

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises `CollectiveError` where ranks called different things, or wait for each other in different groups."""
        self._compared()
        made = self._call.made
        return made.wait() if timeout is None else made.wait(timeout)

    def is_completed(self) -> bool:
        self._pending.advance()
        return self._call.judged and self._call.made.is_completed()

    def get_future(self) -> Any:
        self._compared()
        return self._call.made.get_future()

    def _compared(self) -> None:
        if self._call.judged:
            return
        if self._stall is None:
            self._pending.finish(self._call, None)
            return
        with self._stall:
            self._pending.finish(self._call, self._stall.look)


class ByExchange:
    """The way of backends that do not compare by themselves. `blocking`: callers stand still for the exchange."""

    def __init__(self, comparer: Comparer, *, blocking: bool) -> None:
        self._comparer, self._blocking, self._pending = comparer, blocking, Pending()

    def call(
        self, number: int, mine: Fingerprint, launch: Callable[[], Any], *, rows: Rows | None, stall: Stall | None
    ) -> Any:
        """See `Way`."""
        call = Call(self._comparer.post(number, mine, rows), launch)
        self._pending.add(call)
        work = ComparedWork(call, self._pending, stall)
        if self._blocking:
            self._pending.finish(call, None)
        return work
