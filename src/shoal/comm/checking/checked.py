"""Ranks that compare fingerprints in an exchange of their own, some bytes a rank, before a collective is made.

Gloo ends the process where sizes differ, so that a collective has to wait for the exchange; its caller need not. With
GPUs it has to, because their streams would go on without the collective.

What repeats itself is not compared. A rank that calls what followed the same calls before (`recurrence`) makes the
collective at once; a rank that calls something else makes nothing before all have answered. Ranks guess alike as long
as they have called alike, so that two ranks never make different collectives at the same place: where one of them has
made the expected one, the other has made none, and says so (`dissent`). Of that sort are collectives that no rank ends
before all have called them; a broadcast's root, and the rows of an uneven all-to-all, are always compared.

Ranks that compare through shared memory: every call there bears a mark, and the core refuses it where marks differ.

That costs nothing but the making of the fingerprint. Only when a call was refused do the ranks tell each other, through
the store, what they called last; the first call that differs is named. A rank that waits for nobody in a call, such as
a broadcast's root, hears of it in its next one.

`Checked`: a process group whose ranks compare what they call; where it differs, all of them hear who called what.

How they compare is a `Way`: `by_marks` through shared memory, `by_exchange` elsewhere. The caller goes on meanwhile; it
hears of a difference when it waits, at the latest in its next call. Messages (send, recv) are not compared: the two
ends of one are different calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.comm.checking.disagreement import Dissent, Rows
from shoal.comm.checking.fingerprint import Fingerprint, fingerprint, post
from shoal.comm.checking.flight_recorder import FlightRecorder
from shoal.comm.checking.pending import Call, Pending, Recurrence
from shoal.comm.checking.revocable import Revocable
from shoal.comm.checking.waiting import LOOK_S, Board, Stall, waited
from shoal.comm.shm.group import CoreGroup
from shoal.comm.shm.work import Refused


class ComparedWork(dist.Work):
    """A collective whose fingerprints are being compared, or that was expected."""

    def __init__(self, call: Call, pending: Pending, stall: Stall | None) -> None:
        super().__init__()
        self._call, self._pending, self._stall = call, pending, stall

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises `CollectiveError` where ranks called different things, or wait for each other in different groups."""
        with self._stall or contextlib.nullcontext():
            self._pending.finish(self._call, self._stall)
            if timeout is None:
                self._pending.end(self._call, self._stall)
                return True
        made = self._call.made
        return made is None or made.wait(timeout)

    def is_completed(self) -> bool:
        self._pending.advance()
        return self._call.judged and ((made := self._call.made) is None or made.is_completed())

    def get_future(self) -> Any:
        with self._stall or contextlib.nullcontext():
            self._pending.finish(self._call, self._stall)
        if (made := self._call.made) is None:
            raise RuntimeError("this work was waited for, and is over: ask for its future before")
        return made.get_future()


class ByExchange:
    """The way of backends that do not compare by themselves: over the group `exchange`, and beside it over `store`.

    When ranks differ, `inner` is given up, and `exchange` after it. `expects`: the expected is not compared; for groups
    whose calls end when they are given up. `blocking`: callers stand still for the exchange.
    """

    def __init__(
        self, inner: Revocable, exchange: Any, store: Store, recorder: FlightRecorder, *, board: Board | None,
        expects: bool, blocking: bool,
    ) -> None:  # fmt: skip
        self._exchange, self._recorder = Revocable(exchange), recorder
        self._expects, self._blocking = expects, blocking
        self._recurrence = Recurrence()
        self._pending = Pending(Dissent(store), recorder.compare, (inner, self._exchange), board)

    def call(
        self, number: int, mine: Fingerprint, launch: Callable[[], Any], *, rows: Rows | None, stall: Stall | None
    ) -> Any:
        """See `Way`."""
        self._recorder.add(number, mine, rows)
        expected = self._expects and mine.mutual and self._recurrence.expected == mine.number
        self._recurrence.add(mine.number)
        asks = not (expected or self._pending.refused)
        call = Call(number, post(self._exchange.group, number, mine, rows) if asks else None, launch)
        self._pending.add(call)
        if self._blocking:
            self._pending.finish(call, None)
        return ComparedWork(call, self._pending, stall)


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
