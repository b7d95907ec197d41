"""Ranks that compare through shared memory: every call there bears a mark, and the core refuses it where marks differ.

That costs nothing but the making of the fingerprint. Only when a call was refused do the ranks tell each other, through
the store, what they called last; the first call that differs is named. A rank that waits for nobody in a call, such as
a broadcast's root, hears of it in its next one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.comm.checking.disagreement import Rows
from shoal.comm.checking.fingerprint import Fingerprint
from shoal.comm.checking.flight_recorder import FlightRecorder
from shoal.comm.checking.waiting import LOOK_S, Stall, waited
from shoal.comm.shm.core_group import CoreGroup
from shoal.comm.shm.core_work import Refused


class MarkedWork(dist.Work):
    """A collective that the core compares."""

    def __init__(self, made: Any, recorder: FlightRecorder, stall: Stall | None) -> None:
        super().__init__()
        self._made, self._recorder, self._stall = made, recorder, stall

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises `CollectiveError` where ranks called different things, or wait for each other in different groups."""
        try:
            if timeout is not None or self._stall is None:
                return self._made.wait(timeout)
            with self._stall:
                while not waited(self._made, LOOK_S):
                    self._stall.look()
        except Refused:
            self._recorder.compare()
            raise
        return True

    def is_completed(self) -> bool:
        return self._made.is_completed()

    def get_future(self) -> Any:
        return self._made.get_future()


class ByMarks:
    """The way of groups in shared memory."""

    def __init__(self, group: CoreGroup, recorder: FlightRecorder) -> None:
        self._group, self._recorder = group, recorder

    def call(
        self, number: int, mine: Fingerprint, launch: Callable[[], Any], *, rows: Rows | None, stall: Stall | None
    ) -> Any:
        """See `Way`."""
        self._recorder.add(number, mine, rows)
        self._group.announce(mine.number)
        return MarkedWork(launch(), self._recorder, stall)
