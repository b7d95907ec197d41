"""Whether all ranks call the same: fingerprints that are exchanged beside the collectives.

An exchange is 32 bytes a rank, and posted without waiting; who looks at the outcome, and when, is the business of
`pending`. Of an uneven all-to-all it has two digests of the rows: what all ranks together send to each other is what
they together expect, or a sum over the digests differs. What was called is told only where something differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shoal.comm.checking.disagreement import Rows
from shoal.comm.checking.fingerprint import Fingerprint

_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Comparison:
    """One comparison under way. `numbers` become a row for each rank."""

    numbers: Tensor
    work: Any

    def arrived(self) -> bool:
        """Whether all ranks have posted theirs."""
        return self.work.is_completed()

    def same(self) -> bool:
        """Whether all ranks, which have posted theirs, call the same."""
        calls, sent, expected = self.numbers[:, :2], self.numbers[:, 2], self.numbers[:, 3]
        return bool((calls == calls[0]).all()) and (int(sent.sum()) - int(expected.sum())) & _MASK == 0


def post(exchange: Any, call: int, mine: Fingerprint, rows: Rows | None) -> Comparison:
    """Starts the comparison of the `call`-th call over the group `exchange`. All ranks post equally often."""
    own = torch.tensor([call, mine.number, *(digests(exchange.rank(), rows) if rows else (0, 0))])
    numbers = own.new_empty(exchange.size() * own.numel())
    work = exchange._allgather_base(numbers, own, c10d.AllgatherOptions())
    return Comparison(numbers.view(exchange.size(), -1), work)


def digests(rank: int, rows: Rows) -> tuple[int, int]:
    """Of what this rank sends to each, and of what it expects of each: sums of numbers below 2^63, modulo that.

    Over all ranks the two add up to the same where each expects what it is sent; elsewhere hardly ever.
    """
    sent = sum(_mixed(rank, other, count) for other, count in enumerate(rows[0]))
    return sent & _MASK, sum(_mixed(other, rank, count) for other, count in enumerate(rows[1])) & _MASK


def _mixed(sender: int, receiver: int, rows: int) -> int:
    """63 bits that look random (the finalizer of splitmix64: Steele, Lea and Flood, OOPSLA 2014)."""
    number = (sender * 0x9E3779B97F4A7C15 + receiver * 0xC2B2AE3D27D4EB4F + rows * 0x165667B19E3779F9) & (2**64 - 1)
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    number = (number ^ number >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return (number ^ number >> 31) & _MASK
