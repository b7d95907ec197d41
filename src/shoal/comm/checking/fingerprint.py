"""What a rank says of a collective before it is made: the operation, its types and shapes, and where it was called.

Ranks that make the same call have the same `Fingerprint.number`: it follows from everything that has to be alike on all
ranks of a group, and from nothing else. Places in the code may differ.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
