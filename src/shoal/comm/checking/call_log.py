"""`CallLog`: the last collectives of a rank in one group, each with the line of code that called it.

Every group keeps one, as PyTorch's flight recorder does for NCCL. It is read when a call fails: ranks publish their
logs, and the first call in which they differ names the mistake (`shoal.comm.diagnosis`). A record takes less than
1 us, because nothing is formatted before it is read.

Calls are numbered from 1. Sends and receives are not logged: their two ends are different calls.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

KEPT = 64
"""Calls that a rank remembers; more are hardly under way at once."""
_REDUCTIONS: tuple[tuple[Any, str], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
)
_INSIDE, _LIBRARY, _USERS = range(3)
"""Whose a line of code is: PyTorch's or a collective's own, another library's or the rest of Shoal's, the user's."""
_INSIDE_OF = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")
LIBRARY = (
    *_INSIDE_OF,
    f"{Path(__file__).parents[2]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "scripts")),
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    "<frozen",
    "<string>",
)
"""Parts of paths that are not the user's code."""


class Call(NamedTuple):
    """One collective. `reduce_op` and `root` are None where it has none; `uneven`: the first dim of its tensors may
    differ between ranks."""

    operation: str
    tensors: Sequence[tuple[torch.dtype, Sequence[int]]]
    reduce_op: Any
    root: int | None
    uneven: bool
    file: str
    line: int

    @property
    def signature(self) -> str:
        """All that has to be the same on all ranks."""
        name = next((name for op, name in _REDUCTIONS if self.reduce_op == op), "other")
        reduction = "" if self.reduce_op is None else f" ({name})"
        shapes = ", ".join(self._shown(dtype, shape) for dtype, shape in self.tensors)
        root = "" if self.root is None else f", root {self.root}"
        return f"{self.operation}{reduction}{' of ' if shapes else ''}{shapes}{root}"

    @property
    def digest(self) -> int:
        """63 bits of the signature."""
        return int.from_bytes(hashlib.blake2b(self.signature.encode(), digest_size=8).digest(), "big") >> 1

    def __str__(self) -> str:
        return f"{self.signature} at {self.file}:{self.line}"

    def _shown(self, dtype: torch.dtype, shape: Sequence[int]) -> str:
        dims = ["*" if self.uneven and index == 0 else str(size) for index, size in enumerate(shape)]
        return f"{str(dtype).removeprefix('torch.')} [{', '.join(dims)}]"


def _kind_of(file: str) -> int:
    if file.startswith(_INSIDE_OF):
        return _INSIDE
    return _LIBRARY if any(part in file for part in LIBRARY) else _USERS


class CallLog:
    """`count` collectives were called so far."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: deque[tuple] = deque(maxlen=KEPT)
        self._kinds: dict[str, int] = {}

    def add(
        self, operation: str, tensors: Sequence[Tensor], reduce_op: Any, root: int | None, uneven: bool, depth: int = 1
    ) -> None:
        """Records a call that is being made now. Its line is the nearest one of the user's; without any, the nearest
        outside PyTorch and `shoal.comm`. The search begins `depth` frames above this one."""
        self.count += 1
        frame, kinds, nearest = sys._getframe(depth), self._kinds, None
        while frame is not None:
            name = frame.f_code.co_filename
            kind = kinds.get(name)
            if kind is None:
                kind = kinds[name] = _kind_of(name)
            if kind == _USERS or (kind == _LIBRARY and nearest is None):
                nearest = (name, frame.f_lineno)
                if kind == _USERS:
                    break
            frame = frame.f_back
        shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._rows.append((operation, shapes, reduce_op, root, uneven, *(nearest or ("", 0))))

    def last(self) -> Call:
        """The newest call."""
        return Call(*self._rows[-1])

    def calls(self) -> dict[int, Call]:
        """Those that are remembered, by number."""
        first = self.count - len(self._rows) + 1
        return {first + index: Call(*row) for index, row in enumerate(tuple(self._rows))}
