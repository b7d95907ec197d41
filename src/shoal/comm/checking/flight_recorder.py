"""The last calls of a rank, kept for the day on which ranks differ: then they tell each other, through the store.

(PyTorch keeps such a record for NCCL, and calls it the flight recorder.)
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from shoal.comm.checking.disagreement import Rows, disagreement, judge_rows, said, told
from shoal.comm.checking.fingerprint import Fingerprint
from shoal.errors import CollectiveError

REMEMBERED = 64
"""Calls of which a rank can tell; more are hardly under way at once."""


class FlightRecorder:
    """Of one rank of the group that is called `label`. `members` names its ranks for people."""

    def __init__(self, store: Store, rank: int, members: Sequence[str], label: str) -> None:
        self._store, self._rank, self._members, self._label = store, rank, members, label
        self._last: deque[tuple[int, Fingerprint, Rows | None]] = deque(maxlen=REMEMBERED)

    def add(self, number: int, call: Fingerprint, rows: Rows | None) -> None:
        """The `number`-th call. `rows` are those of an uneven all-to-all."""
        self._last.append((number, call, rows))

    def compare(self, number: int | None = None) -> None:
        """Raises `CollectiveError`, the same on all ranks, for the first call that differs between them.

        Where those that tell tell no difference: for call `number`, if there is one known to differ.
        """
        mine = {call: [made.what, str(made), rows] for call, made, rows in self._last}
        answers = told(self._store, "calls", self._rank, len(self._members), json.dumps(mine))
        calls = [json.loads(answers[rank]) if rank in answers else None for rank in range(len(self._members))]
        for call in mine:
            self._judge(call, [their and their.get(str(call), []) for their in calls])
        if number is not None:
            self._refuse(number, [their and their.get(str(number), []) for their in calls])

    def _judge(self, number: int, calls: Sequence[Any]) -> None:
        known = [call for call in calls if call]
        if len({call[0] for call in known}) > 1:
            self._refuse(number, calls)
        if len(known) == len(calls) and all(call[2] for call in known):
            rows = torch.tensor([[*call[2][0], *call[2][1]] for call in known])
            judge_rows(rows, self._named(number), self._members)

    def _refuse(self, number: int, calls: Sequence[Any]) -> None:
        texts = [said(None if call is None else call[1] if call else "") for call in calls]
        raise CollectiveError(disagreement(texts, self._named(number), self._members))

    def _named(self, number: int) -> str:
        return f"call number {number} of group '{self._label}'"
