"""Which rank is to blame: after a collective has failed, the ranks tell each other what they called.

Every rank whose collective failed publishes its log of calls. The first call in which two logs differ is the mistake.
Otherwise ranks that publish nothing in time are the culprits (dead, stopped or busy elsewhere), or those that have made
fewer calls. A store that does not answer points to the rank that hosts it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.board import Board
from shoal.errors import CollectiveError, GenerationOver

# `CallLog`: the last collectives of a rank in one group, each with the line of code that called it.
#
# Every group keeps one, as PyTorch's flight recorder does for NCCL. It is read when a call fails: ranks publish their
# logs, and the first call in which they differ names the mistake. A record takes less than
# 1 us, because nothing is formatted before it is read.
#
# Calls are numbered from 1. Sends and receives are not logged: their two ends are different calls.


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


PATIENCE_S = 2.0
_GONE = re.compile(r"rank (\d+) of the group is gone")
"""What the transport over shared memory says of a process that has ended: it publishes nothing any more."""
NAMED = 8
"""Ranks of one call that a sentence lists."""


@dataclass(frozen=True)
class Diagnosis:
    """What one rank of one group needs to find the culprits. `members` names each rank for people (rank, host, pid)."""

    board: Board
    rank: int
    members: tuple[str, ...]
    label: str = ""
    log: CallLog = field(default_factory=CallLog)
    patience_s: float = PATIENCE_S

    def called(self, number: int) -> str:
        """A collective of this group, for people."""
        return f"call number {number} of group '{self.label}'"

    def sentence(self, what: str, waited_s: float, error: str) -> str:
        """One or two sentences: what failed on this rank after how long, and which ranks are to blame."""
        head = f"{self.members[self.rank]}: {what} failed after {waited_s:.1f} s"
        gone = _GONE.search(error)
        try:
            logs = self._logs("failed", without=None if gone is None else int(gone[1]))
        except GenerationOver as over:
            return f"{head}: {over}"
        except CollectiveError:
            return f"{head}, and the store does not answer: its host, {self.members[0]}, is dead or stopped"
        if (number := _first_difference(logs)) is not None:
            return f"{head}: {self._differs(number, logs)}"
        if silent := [name for rank, name in enumerate(self.members) if rank not in logs]:
            return f"{head}: {', '.join(silent)} did not come: dead, stopped, or busy for too long"
        most = max(log["count"] for log in logs.values())
        if behind := [rank for rank, log in logs.items() if log["count"] < most]:
            places = "; ".join(
                f"{self.members[rank]} made fewer calls, the last was {_last(logs[rank])}" for rank in behind
            )
            return f"{head}: {places}"
        return f"{head}: {error.splitlines()[0] if error else 'the backend gave no reason'}"

    def difference(self, number: int) -> CollectiveError:
        """What to raise for a call in which the ranks are known to differ. All of them have to ask."""
        return CollectiveError(self._differs(number, self._logs(f"differs/{number}")))

    def _differs(self, number: int, logs: dict[int, Any]) -> str:
        none = ["", "a collective that it did not report"]
        texts = [logs.get(rank, {}).get("calls", {}).get(str(number), none) for rank in range(len(self.members))]
        return disagreement([text for _, text in texts], self.called(number), self.members)

    def _logs(self, key: str, *, without: int | None = None) -> dict[int, Any]:
        """What each rank has called, by rank; ranks that publish nothing are left out. Nobody waits for `without`."""
        calls = {number: [call.signature, str(call)] for number, call in self.log.calls().items()}
        self.board.publish(f"{key}/{self.rank}", json.dumps({"count": self.log.count, "calls": calls}))
        keys = {f"{key}/{rank}": rank for rank in range(len(self.members)) if rank != without}
        return {keys[k]: json.loads(log) for k, log in self.board.collect_some(list(keys), self.patience_s).items()}


def _first_difference(logs: dict[int, Any]) -> int | None:
    """The first call, among those that ranks remember, in which two of them differ."""
    numbers = sorted({int(number) for log in logs.values() for number in log["calls"]})
    for number in numbers:
        signatures = {log["calls"][str(number)][0] for log in logs.values() if str(number) in log["calls"]}
        if len(signatures) > 1:
            return number
    return None


def _last(log: Any) -> str:
    return log["calls"][str(log["count"])][1] if log["count"] else "none"


def disagreement(texts: Sequence[str], what: str, members: Sequence[str]) -> str:
    """From what each rank called: the sentence that names them, ranks of one call together."""
    callers: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        callers.setdefault(text, []).append(rank)
    named = "; ".join(f"{_named(members, ranks)} called {text}" for text, ranks in callers.items())
    return (
        f"{what} differs between ranks: {named}: all ranks of a group must make the same calls, with the same shapes "
        "and types, in the same order; make the two places alike"
    )


def _named(members: Sequence[str], ranks: Sequence[int]) -> str:
    """The first in full, the others by number."""
    more = ", ".join(f"{members[rank].split(' (')[0]}" for rank in ranks[1:NAMED])
    rest = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return members[ranks[0]] + (f", {more}" if more else "") + rest
