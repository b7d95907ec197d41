"""Ranks that compare through shared memory: every call there bears a mark, and the core refuses it where marks differ.

That costs nothing but the making of the fingerprint. Only when a call was refused do the ranks tell each other, through
the store, what they called last; the first call that differs is named. A rank that waits for nobody in a call, such as
a broadcast's root, hears of it in its next one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.comm.disagreement import SILENT, Rows, disagreement, judge_rows, told
from shoal.comm.fingerprint import Fingerprint
from shoal.comm.shm.core_group import CoreGroup
from shoal.comm.shm.core_work import Refused
from shoal.comm.waiting import LOOK_S, Stall, waited
from shoal.errors import CollectiveError

REMEMBERED = 64
"""Calls of which a rank can tell; more are hardly under way at once."""


class MarkedWork(dist.Work):
    """A collective that the core compares."""

    def __init__(self, made: Any, way: ByMarks, stall: Stall | None) -> None:
        super().__init__()
        self._made, self._way, self._stall = made, way, stall

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises `CollectiveError` where ranks called different things, or wait for each other in different groups."""
        try:
            if timeout is not None or self._stall is None:
                return self._made.wait(timeout)
            with self._stall:
                while not waited(self._made, LOOK_S):
                    self._stall.look()
        except Refused:
            self._way.explain()
            raise
        return True

    def is_completed(self) -> bool:
        return self._made.is_completed()

    def get_future(self) -> Any:
        return self._made.get_future()


class ByMarks:
    """The way of groups in shared memory. `members` names the ranks for people."""

    def __init__(self, group: CoreGroup, store: Store, members: Sequence[str], label: str) -> None:
        self._group, self._store, self._members, self._label = group, store, members, label
        self._last: deque[tuple[int, Fingerprint, Rows | None]] = deque(maxlen=REMEMBERED)

    def call(
        self, number: int, mine: Fingerprint, launch: Callable[[], Any], *, rows: Rows | None, stall: Stall | None
    ) -> Any:
        """See `Way`."""
        self._last.append((number, mine, rows))
        self._group.announce(mine.number)
        return MarkedWork(launch(), self, stall)

    def explain(self) -> None:
        """Raises `CollectiveError` for the first call that differs between ranks; returns where none is known."""
        mine = {number: [call.what, str(call), rows] for number, call, rows in self._last}
        found = told(self._store, "marks", self._group.rank(), self._group.size(), json.dumps(mine))
        calls = [json.loads(found.get(rank, "{}")) for rank in range(self._group.size())]
        for number in mine:
            self._judge(number, [their.get(str(number)) for their in calls])

    def _judge(self, number: int, calls: Sequence[Any]) -> None:
        what = f"call number {number} of group '{self._label}'"
        known = [call for call in calls if call is not None]
        if len({call[0] for call in known}) > 1:
            texts = [SILENT if call is None else call[1] for call in calls]
            raise CollectiveError(disagreement(texts, what, self._members))
        if len(known) == len(calls) and all(call[2] for call in known):
            judge_rows(torch.tensor([[*call[2][0], *call[2][1]] for call in known]), what, self._members)
