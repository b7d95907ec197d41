"""Ranks that compare fingerprints in an exchange of their own, some bytes a rank, before a collective is made.

Gloo ends the process where sizes differ, so that a collective has to wait for the exchange; its caller need not. With
GPUs it has to, because their streams would go on without the collective.

What repeats itself is not compared. A rank that calls what followed the same calls before (`recurrence`) makes the
collective at once; a rank that calls something else makes nothing before all have answered. Ranks guess alike as long
as they have called alike, so that two ranks never make different collectives at the same place: where one of them has
made the expected one, the other has made none, and says so (`dissent`). Of that sort are collectives that no rank ends
before all have called them; a broadcast's root, and the rows of an uneven all-to-all, are always compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.comm.checking.comparison import post
from shoal.comm.checking.disagreement import Rows
from shoal.comm.checking.dissent import Dissent
from shoal.comm.checking.fingerprint import Fingerprint
from shoal.comm.checking.flight_recorder import FlightRecorder
from shoal.comm.checking.pending import Call, Pending
from shoal.comm.checking.recurrence import Recurrence
from shoal.comm.checking.revocable import Revocable
from shoal.comm.checking.waiting import Board, Stall


class ComparedWork(dist.Work):
    """A collective whose fingerprints are being compared, or that was expected."""

    def __init__(self, call: Call, pending: Pending, stall: Stall | None) -> None:
        super().__init__()
        self._call, self._pending, self._stall = call, pending, stall

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises `CollectiveError` where ranks called different things, or wait for each other in different groups."""
        with self._stall or contextlib.nullcontext():
            self._pending.finish(self._call, self._stall)
            if timeout is None:
                self._pending.end(self._call, self._stall)
                return True
        made = self._call.made
        return made is None or made.wait(timeout)

    def is_completed(self) -> bool:
        self._pending.advance()
        return self._call.judged and ((made := self._call.made) is None or made.is_completed())

    def get_future(self) -> Any:
        with self._stall or contextlib.nullcontext():
            self._pending.finish(self._call, self._stall)
        if (made := self._call.made) is None:
            raise RuntimeError("this work was waited for, and is over: ask for its future before")
        return made.get_future()


class ByExchange:
    """The way of backends that do not compare by themselves: over the group `exchange`, and beside it over `store`.

    When ranks differ, `inner` is given up, and `exchange` after it. `expects`: the expected is not compared; for groups
    whose calls end when they are given up. `blocking`: callers stand still for the exchange.
    """

    def __init__(
        self, inner: Revocable, exchange: Any, store: Store, recorder: FlightRecorder, *, board: Board | None,
        expects: bool, blocking: bool,
    ) -> None:  # fmt: skip
        self._exchange, self._recorder = Revocable(exchange), recorder
        self._expects, self._blocking = expects, blocking
        self._recurrence = Recurrence()
        self._pending = Pending(Dissent(store), recorder.compare, (inner, self._exchange), board)

    def call(
        self, number: int, mine: Fingerprint, launch: Callable[[], Any], *, rows: Rows | None, stall: Stall | None
    ) -> Any:
        """See `Way`."""
        self._recorder.add(number, mine, rows)
        expected = self._expects and mine.mutual and self._recurrence.expected == mine.number
        self._recurrence.add(mine.number)
        asks = not (expected or self._pending.refused)
        call = Call(number, post(self._exchange.group, number, mine, rows) if asks else None, launch)
        self._pending.add(call)
        if self._blocking:
            self._pending.finish(call, None)
        return ComparedWork(call, self._pending, stall)
