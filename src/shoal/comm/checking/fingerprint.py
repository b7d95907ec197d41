"""What a rank says of a collective before it is made: the operation, its types and shapes, and where it was called.

Ranks that make the same call have the same `Fingerprint.number`: it follows from everything that has to be alike on all
ranks of a group, and from nothing else. Places in the code may differ.

Whether all ranks call the same: fingerprints that are exchanged beside the collectives.

An exchange is 32 bytes a rank, and posted without waiting; who looks at the outcome, and when, is the business of
`pending`. Of an uneven all-to-all it has two digests of the rows: what all ranks together send to each other is what
they together expect, or a sum over the digests differs. What was called is told only where something differs.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shoal.comm.checking.disagreement import Rows

_OPS: tuple[tuple[Any, str], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
)
_NOT_THE_CALLER = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class Fingerprint(NamedTuple):
    """`what` has to be alike on all ranks, `number` is 63 bits of it; `where` is the line that made the call.

    `mutual`: no rank has its result before all ranks have made the call.
    """

    what: str
    number: int
    where: tuple[str, int]
    mutual: bool = False

    def __str__(self) -> str:
        return f"{self.what} at {self.where[0]}:{self.where[1]}"


def fingerprint(
    operation: str,
    tensors: Sequence[torch.Tensor],
    *,
    reduce_op: Any = None,
    root: int | None = None,
    rows: bool = True,
) -> Fingerprint:
    """Of a call that is being made now. `rows=False`: the first dim may differ between ranks."""
    name = "" if reduce_op is None else next((name for op, name in _OPS if reduce_op == op), "other")
    what, number = _described(operation, tuple((t.dtype, tuple(t.shape)) for t in tensors), name, root, rows)
    mutual = root is None and rows and all(t.numel() for t in tensors)
    return Fingerprint(what, number, _caller(), mutual)


@functools.lru_cache(maxsize=4096)
def _described(
    operation: str, tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...], reduction: str, root: int | None,
    rows: bool,
) -> tuple[str, int]:  # fmt: skip
    """A program makes few different calls, many times."""
    shapes = ", ".join(_shown(dtype, shape, rows) for dtype, shape in tensors)
    what = f"{operation}{f' ({reduction})' if reduction else ''}{' of ' if shapes else ''}{shapes}"
    what += "" if root is None else f", root {root}"
    return what, int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "big") >> 1


def _shown(dtype: torch.dtype, shape: Sequence[int], rows: bool) -> str:
    dims = list(map(str, shape))
    if not rows:
        dims[:1] = ["*"]
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(dims)}]"


def _caller() -> tuple[str, int]:
    """The nearest line outside PyTorch and `shoal.comm`."""
    frame = outermost = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
            return frame.f_code.co_filename, frame.f_lineno
        outermost, frame = frame, frame.f_back
    return outermost.f_code.co_filename, outermost.f_lineno


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
