"""`Checked`: a process group whose ranks compare what they call; where it differs, all of them hear who called what.

How they compare is a `Way`: `by_marks` through shared memory, `by_exchange` elsewhere. The caller goes on meanwhile; it
hears of a difference when it waits, at the latest in its next call. Messages (send, recv) are not compared: the two
ends of one are different calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from shoal.comm.checking.disagreement import Rows
from shoal.comm.checking.fingerprint import Fingerprint, fingerprint
from shoal.comm.checking.revocable import Revocable
from shoal.comm.checking.waiting import Board, Stall


class Way(Protocol):
    """How the ranks of a group compare their calls."""

    def call(
        self, number: int, mine: Fingerprint, launch: Callable[[], Any], *, rows: Rows | None, stall: Stall | None
    ) -> Any:
        """The work of the `number`-th collective, which `launch` makes. `rows` are those of an uneven all-to-all."""
        ...


class Checked:
    """Stands before `inner`, whose collectives nobody else may call. `board` is where stalled ranks are seen."""

    def __init__(self, inner: Revocable, way: Way, *, label: str, board: Board | None = None) -> None:
        self._inner, self._way, self._label, self._board = inner, way, label, board
        self._calls = 0

    @property
    def inner(self) -> Any:
        """The group. Raises `CollectiveError` where it was given up."""
        return self._inner.group

    def __getattr__(self, name: str) -> Any:
        """What is no collective goes straight to the group."""
        return getattr(self.inner, name)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        mine = fingerprint("all_reduce", tensors, reduce_op=opts.reduceOp)
        return self._agreed(mine, lambda: self.inner.allreduce(tensors, opts))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        mine = fingerprint("broadcast", tensors, root=opts.rootRank)
        return self._agreed(mine, lambda: self.inner.broadcast(tensors, opts))

    def reduce(self, tensors: Any, opts: Any) -> Any:
        mine = fingerprint("reduce", tensors, reduce_op=opts.reduceOp, root=opts.rootRank)
        return self._agreed(mine, lambda: self.inner.reduce(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._agreed(fingerprint("all_gather", inputs), lambda: self.inner.allgather(outputs, inputs, opts))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        mine = fingerprint("all_gather", [input])
        return self._agreed(mine, lambda: self.inner._allgather_base(output, input, opts))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        mine = fingerprint("reduce_scatter", [input], reduce_op=opts.reduceOp)
        return self._agreed(mine, lambda: self.inner._reduce_scatter_base(output, input, opts))

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any
    ) -> Any:
        uneven = bool(out_sizes or in_sizes)
        mine = fingerprint("all_to_all", [input], rows=not uneven)
        rows = (in_sizes, out_sizes) if uneven else None
        launch = lambda: self.inner.alltoall_base(output, input, out_sizes, in_sizes, opts)  # noqa: E731
        return self._agreed(mine, launch, rows=rows)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        mine = fingerprint("gather", inputs, root=opts.rootRank)
        return self._agreed(mine, lambda: self.inner.gather(outputs, inputs, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        mine = fingerprint("scatter", outputs, root=opts.rootRank)
        return self._agreed(mine, lambda: self.inner.scatter(outputs, inputs, opts))

    def barrier(self, opts: Any) -> Any:
        return self._agreed(fingerprint("barrier", []), lambda: self.inner.barrier(opts))

    def _agreed(self, mine: Fingerprint, launch: Callable[[], Any], rows: Rows | None = None) -> Any:
        self._calls += 1
        stall = None if self._board is None else self._board.call(self._label, mine)
        return self._way.call(self._calls, mine, launch, rows=rows, stall=stall)
