"""A call under way in the core. It is carried out by whoever waits for it."""

from __future__ import annotations

import copy
import ctypes
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.seam_work import FutureThreads, complete
from shoal.comm.shm.core import CallState, Core, Fault, Signature, sentence
from shoal.comm.typed_future import readable
from shoal.comm.untraced import untraced

PATIENCE_S = 0.1
"""How long the core is waited in before Python looks whether somebody has pressed Ctrl-C."""


class Kept(NamedTuple):
    """What belongs to a call until it is over: tensors that it writes, all that must live, and what is done then."""

    outputs: Sequence[Tensor]
    held: object
    finish: Sequence[Callable[[], object]]


_NOTHING = Kept((), None, ())

UnderWay = OrderedDict[int, "CoreWork"]
"""Works that are not over, by their ids."""


@untraced
class CoreWork(dist.Work):
    """`in_order`: works of the group like this one end in the order in which they were made. It is taken out of
    `under_way` when it is over. `own_limit`: `timeout_s` is not the group's own, and the core counts it from the first
    wait on."""

    def __init__(
        self, core: Core, handle: int, kept: Kept, *, rank: int, timeout_s: float, futures: FutureThreads,
        under_way: UnderWay, in_order: bool, own_limit: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._core, self._handle, self._rank, self._timeout_s = core, handle, rank, timeout_s
        self._outputs, self._kept, self._futures, self._under_way = list(kept.outputs), kept, futures, under_way
        self._in_order, self._once, self._own_limit = in_order, threading.Lock(), own_limit
        self._error: Exception | None = None
        self._over = False

    def __del__(self) -> None:
        if self._handle:
            self._core.shoal_drop(self._handle)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks, without the interpreter lock. Raises `RuntimeError` with what went wrong, or after `timeout`."""
        limit_s = timeout.total_seconds() if timeout else math.inf  # c10d says zero where it means none
        until_s = monotonic() + limit_s
        self._limit()
        try:
            while not self._over:
                outcome = self._core.shoal_wait(self._handle, min(limit_s, PATIENCE_S), True)
                if outcome != CallState.PENDING:
                    self._end(outcome)
                elif monotonic() >= until_s:
                    raise RuntimeError(f"Timed out after {limit_s:g} s waiting for a call through shared memory")
        except BaseException:  # a signal's, too: perhaps nobody waits for it again
            self._core.shoal_leave(self._handle)
            raise
        if self._error is not None:
            raise copy.copy(self._error)  # with its traceback it would hold this work, and be held by it
        return True

    def arrive(self) -> None:
        """Blocks until the core is done with it; what is then to do is left. The process computes meanwhile."""
        self._limit()
        while not self._over and self._core.shoal_wait(self._handle, PATIENCE_S, False) == CallState.PENDING:
            continue

    def is_completed(self) -> bool:
        """Also goes on with the call, if nobody else does."""
        if not self._over and (outcome := self._core.shoal_test(self._handle)) != CallState.PENDING:
            self._end(outcome)
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Completed with the tensors that the call wrote."""
        future: torch.futures.Future = torch.futures.Future()
        if self.is_completed():
            complete(future, self)
        else:
            self._futures.complete(future, self, in_order=self._in_order)
        return readable(future, self._outputs)

    def _source_rank(self) -> int:
        """Who sent what a receive got."""
        return self._report()[4]

    def _limit(self) -> None:
        """A message is late from when somebody first waits for it."""
        if self._own_limit and not self._over:
            self._own_limit = False
            self._core.shoal_limit(self._handle, self._timeout_s)

    def _end(self, outcome: int) -> None:
        with self._once:
            if self._over:
                return
            self._error = self._finished() if outcome == CallState.DONE else self._failure(outcome)
            self._kept, self._over = _NOTHING, True  # the tensors are the caller's again
            self._under_way.pop(id(self), None)

    def _finished(self) -> Exception | None:
        """What went wrong, such as a tensor that cannot be written."""
        try:
            for finish in self._kept.finish:
                finish()
        except Exception as error:
            return error.with_traceback(None)
        return None

    def _report(self) -> tuple[Fault, int, Signature, Signature, int]:
        fault, culprit, peer = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        ours, theirs = Signature(), Signature()
        self._core.shoal_report(self._handle, fault, culprit, ours, theirs, peer)
        return Fault(fault.value), culprit.value, ours, theirs, peer.value

    def _failure(self, outcome: int) -> RuntimeError:
        if outcome == CallState.FOREIGN:
            return RuntimeError("a call can be waited for by the process that made it only")
        report = self._report()
        return RuntimeError(sentence(*report[:4], own=self._rank, timeout_s=self._timeout_s))
