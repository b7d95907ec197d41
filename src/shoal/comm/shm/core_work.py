"""A call under way in the core, and the threads that complete futures.

A call is carried out by whoever waits for it. c10d's futures cannot be waited for by us: they are completed by
threads, which wait in their stead. Like the core's own, they have their share of a core, but do not interrupt the
thread that computes there each time that they are woken (SCHED_BATCH). That took an all-reduce of 1.3 MB over 2 ranks
from 0.75 to 0.64 ms; beside a computation of 15 ms, one of 19 MB ended 0.4 ms earlier.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.at_work import AtWork
from shoal.comm.shm.core import Core, Fault, Kind, Outcome, Signature

PATIENCE_S = 0.1
"""How long the core is waited in before Python looks whether somebody has pressed Ctrl-C."""


class Refused(RuntimeError):
    """The ranks of a group did not make the same call, or another rank gave up."""


_REFUSALS = (Fault.DISAGREE, Fault.WRONG_SIZE, Fault.PEER_FAILED, Fault.PEER_LEFT)


class Kept(NamedTuple):
    """What belongs to a call until it is over: tensors that it writes, all that must live, and what is done then."""

    outputs: Sequence[Tensor]
    held: object
    finish: Sequence[Callable[[], object]]


_NOTHING = Kept((), None, ())

UnderWay = OrderedDict[int, "CoreWork"]
"""Works that are not over, by their ids."""


class CoreWork(dist.Work):
    """`in_order`: works of the group like this one end in the order in which they were made. It is taken out of
    `under_way` when it is over."""

    def __init__(
        self, core: Core, handle: int, kept: Kept, *, rank: int, timeout_s: float, futures: FutureThreads,
        under_way: UnderWay, in_order: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self._core, self._handle, self._rank, self._timeout_s = core, handle, rank, timeout_s
        self._outputs, self._kept, self._futures, self._under_way = list(kept.outputs), kept, futures, under_way
        self._in_order, self._once = in_order, threading.Lock()
        self._error: Exception | None = None
        self._over = False

    def __del__(self) -> None:
        if self._handle:
            self._core.shoal_drop(self._handle)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks, without the interpreter lock. Raises `RuntimeError` with what went wrong, or after `timeout`."""
        return self.ended(timeout, idle=True)

    def ended(self, timeout: timedelta | None = None, *, idle: bool) -> bool:
        """`wait`. `idle`: the process has nothing else to do meanwhile."""
        limit_s = timeout.total_seconds() if timeout else math.inf  # c10d says zero where it means none
        until_s = monotonic() + limit_s
        try:
            while not self._over:
                outcome = self._core.shoal_wait(self._handle, min(limit_s, PATIENCE_S), idle)
                if outcome != Outcome.PENDING:
                    self._end(outcome)
                elif monotonic() >= until_s:
                    raise RuntimeError(f"Timed out after {limit_s:g} s waiting for a call through shared memory")
        except BaseException:  # a signal's, too: perhaps nobody waits for it again
            self._core.shoal_leave(self._handle)
            raise
        if self._error is not None:
            raise copy.copy(self._error)  # with its traceback it would hold this work, and be held by it
        return True

    def is_completed(self) -> bool:
        """Also goes on with the call, if nobody else does."""
        if not self._over and (outcome := self._core.shoal_test(self._handle)) != Outcome.PENDING:
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
        return future

    def _source_rank(self) -> int:
        """Who sent what a receive got."""
        return self._report()[4]

    def _end(self, outcome: int) -> None:
        with self._once:
            if self._over:
                return
            self._error = self._finished() if outcome == Outcome.DONE else self._failure(outcome)
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
        if outcome == Outcome.FOREIGN:
            return RuntimeError("a call can be waited for by the process that made it only")
        report = self._report()
        kind = Refused if report[0] in _REFUSALS else RuntimeError
        return kind(self._sentence(*report[:4]))

    def _sentence(self, fault: Fault, rank: int, ours: Signature, theirs: Signature) -> str:
        return {
            Fault.PEER_DEAD: f"Connection closed by peer: rank {rank} of the group is gone",
            Fault.PEER_LEFT: f"rank {rank} of the group has closed it",
            Fault.PEER_FAILED: f"another rank of the group gave up on rank {rank}",
            Fault.TIMED_OUT: f"Timed out after {self._timeout_s:g} s waiting for rank {rank} of the group",
            Fault.DISAGREE: f"rank {self._rank} called {_named(ours)}, rank {rank} of the group {_named(theirs)}: all "
            "ranks must make the same calls in the same order",
            Fault.WRONG_SIZE: f"rank {rank} of the group sends {theirs.bytes} bytes, rank {self._rank} expects "
            f"{ours.bytes}",
            Fault.CLOSED: "this group is closed",
            Fault.UNSHARED: f"rank {rank} of the group has not allocated the memory of this call, or another size: all "
            "ranks must allocate the same in the same order",
            Fault.NO_MEMORY: "no memory for a message that nobody has asked for yet",
        }.get(fault, f"shared memory failed ({fault.name})")


def _named(call: Signature) -> str:
    where = f" at byte {call.offset} of shared allocation {call.window}" if call.window else ""
    return f"{Kind(call.kind).name.lower()} of {call.bytes} bytes{where}"


def complete(future: torch.futures.Future, work: CoreWork) -> None:
    """Waits for `work` and says in `future` how it went."""
    try:
        work.ended(idle=False)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(work.result())


_Asked = tuple[torch.futures.Future, CoreWork]


class FutureThreads:
    """Complete futures: those of collectives in the order in which they were asked for, which is that of their end.

    One thread waits for works; while it completes a future, whose callbacks may make calls and wait for their futures,
    another one does. Messages end in any order, and have a thread each.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._waits, self._count = threading.Lock(), threading.Lock()
        self._idle = 0

    def complete(self, future: torch.futures.Future, work: CoreWork, *, in_order: bool) -> None:
        """`in_order`: not before those that were asked for earlier."""
        if not in_order:
            _start(_complete_alone, future, work)
            return
        self._asked.put((future, work))
        self._follow()

    def close(self) -> None:
        """Returns at once; futures that were asked for are still completed."""
        self._asked.put(None)

    def _follow(self) -> None:
        """Sees to it that a thread takes what is asked for next, though this one may be kept by a callback."""
        with self._count:
            if self._idle > 0:
                return
            self._idle += 1
        _start(self._serve)

    def _serve(self) -> None:
        _be_patient()
        at_work = AtWork()
        while (pair := self._next()) is not None:
            with at_work:
                complete(*pair)
                del pair  # an idle thread keeps no tensor alive
            with self._count:
                self._idle += 1

    def _next(self) -> _Asked | None:
        """The next whose work is over, or None at the end."""
        with self._waits:
            pair = self._asked.get()
            if pair is None:
                self._asked.put(None)  # for the other threads
                return None
            _, work = pair
            with contextlib.suppress(Exception):  # `complete` tells of it
                work.ended(idle=False)
            with self._count:
                self._idle -= 1
        if not self._asked.empty():
            self._follow()
        return pair


def _complete_alone(future: torch.futures.Future, work: CoreWork) -> None:
    with contextlib.suppress(Exception):  # `complete` tells of it
        work.ended(idle=False)
    with AtWork():
        complete(future, work)


def _start(target: Callable[..., object], *args: object) -> None:
    threading.Thread(target=target, args=args, name="shoal-futures", daemon=True).start()


def _be_patient() -> None:
    """A thread with a policy of its own keeps it; where none may be chosen, this one is as any other."""
    thread = threading.get_native_id()
    with contextlib.suppress(PermissionError):
        if os.sched_getscheduler(thread) == os.SCHED_OTHER:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
