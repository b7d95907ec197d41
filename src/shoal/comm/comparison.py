"""Whether all ranks call the same: fingerprints that are exchanged beside the collectives.

An exchange is eight bytes a rank (and the rows of an uneven all-to-all, where there are any). It is posted without
waiting; who looks at the outcome, and when, is the business of `by_exchange`. Texts are exchanged, through the store,
only where fingerprints differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from shoal.comm.disagreement import SILENT, Rows, disagreement, judge_rows, told
from shoal.comm.fingerprint import Fingerprint
from shoal.errors import CollectiveError


@dataclass(frozen=True)
class Comparer:
    """What one rank of a group compares with. `exchange` carries fingerprints; `members` names the ranks for people."""

    exchange: Any
    store: Store
    members: Sequence[str]
    label: str

    def post(self, call: int, mine: Fingerprint, rows: Rows | None) -> Comparison:
        """Starts the comparison of the `call`-th call. All ranks post the same number of times."""
        numbers, work = self._gathered(torch.tensor([mine.number]))
        told = None if rows is None else self._gathered(torch.tensor([*rows[0], *rows[1]]))
        return Comparison(self, call, mine, numbers, work, told)

    def texts(self, call: int, mine: Fingerprint) -> list[str]:
        """What each rank called; what those are waiting in that do not answer is not known."""
        found = told(self.store, f"check/{call}", self.exchange.rank(), len(self.members), str(mine))
        return [found.get(rank, SILENT) for rank in range(len(self.members))]

    def _gathered(self, own: Tensor) -> tuple[Tensor, Any]:
        everyone = own.new_empty(len(self.members) * own.numel())
        return everyone, self.exchange._allgather_base(everyone, own, c10d.AllgatherOptions())


@dataclass(frozen=True)
class Comparison:
    """One comparison under way."""

    comparer: Comparer
    call: int
    mine: Fingerprint
    numbers: Tensor
    work: Any
    told: tuple[Tensor, Any] | None

    @property
    def what(self) -> str:
        """The call, for people."""
        return f"call number {self.call} of group '{self.comparer.label}'"

    def arrived(self) -> bool:
        """Whether all ranks have posted theirs."""
        return self.work.is_completed() and (self.told is None or self.told[1].is_completed())

    def judge(self) -> None:
        """Waits for all ranks. Raises the same `CollectiveError` on all of them where they differ."""
        self.work.wait()
        if self.told is not None:
            self.told[1].wait()
        if any(number != self.mine.number for number in self.numbers.tolist()):
            raise CollectiveError(
                disagreement(self.comparer.texts(self.call, self.mine), self.what, self.comparer.members)
            )
        if self.told is not None:
            judge_rows(self.told[0].view(len(self.comparer.members), -1), self.what, self.comparer.members)
