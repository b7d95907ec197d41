"""`Transport`: a rank's side of a group in the C core. Tensors go in, works under way come out.

segment   4 MB in 16 places for collectives, 1 MB for messages to each rank; taken page by page when first written, but
          for what small calls use of their places: all of it at the first of them
windows   what `allocate` gives: every rank's memory, mapped by all
waiting   a rank looks a hundred times (5 us), then sleeps. A collective's caller, who has nothing else to do, looks for
          100 us more and lets go of its core between looks; ranks that share one meanwhile move apart. Ranks that
          outnumber the cores sleep at once
thread    goes on with calls behind the caller's back; not with those in windows where all cores compute
"""

from __future__ import annotations

import copy
import ctypes
import errno
import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_uint8, c_uint64, c_void_p
from datetime import timedelta
from time import monotonic
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.c10d_forms import SmallWorks, readable, untraced
from shoal.comm.seam_work import FutureThreads, complete
from shoal.comm.shm.core import BYTES, MOVED, CallState, Core, Fault, Kind, Settings, Signature, load_call, sentence
from shoal.comm.shm.host import HostMates, create_segment, window_name
from shoal.errors import CollectiveError

# A call under way in the core. It is carried out by whoever waits for it.


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


_LOOKED_AT = 4  # works under way, at each call: more than it adds
_WHY_NOT = {
    errno.ECHILD: "another process made it",
    errno.ENOTCONN: "it is closed",
    errno.ETIMEDOUT: "a rank of it takes nothing in",
}


class Transport:
    """Ends when it is closed or dropped, after what was begun. Calls are refused after that.

    `prompt`: a collective that its caller waits for at once (`sync`) ends within the call and gives no work, as c10d
    allows its backends: half of a small one was making a work and calling through ctypes. One that fails gives a work;
    so does one of lists, or of a core without the interpreter's headers, that takes long.
    """

    def __init__(
        self, core: Core, mates: HostMates, *, rank: int, settings: Settings, prompt: bool = False
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, len(mates.segments)
        self._core, self._timeout_s, self._futures = core, settings.timeout_s, FutureThreads()
        self._under_way: UnderWay = OrderedDict()
        self._small = SmallWorks()
        self._prompt, self._call = prompt, load_call() if prompt else None
        self._limit_s: float | None = None
        self.calls = 0  # collectives that were made
        streams = [mates.streams[q].detach() if q in mates.streams else -1 for q in range(self.size)]
        segments = (c_void_p * self.size)(*(segment.hand_over() for segment in mates.segments))
        handle = core.shoal_open(rank, self.size, segments, (c_int * self.size)(*streams), byref(settings))
        if handle is None:
            raise MemoryError("no memory for a group")
        self._handle: int = handle
        self._life = _Life(core, handle, self._under_way, self._small, self._futures)
        weakref.finalize(self, self._life.free).atexit = False  # the kernel tidies up after a process

    def close(self) -> None:
        """Ends the group when the calls that were made are done."""
        self._life.end()

    @property
    def timeout_s(self) -> float:
        """The longest wait in a call."""
        return self._timeout_s if self._limit_s is None else self._limit_s

    def set_timeout(self, timeout_s: float) -> None:
        """The longest wait in each later collective, and for each later message, in place of the settings'
        `timeout_s`."""
        self._limit_s = timeout_s

    def give_up(self) -> None:
        """Calls under way fail, here and on the other ranks; the group is of no more use."""
        if not self._life.over:
            self._core.shoal_break(self._handle, Fault.CLOSED, self.rank)

    def allocate(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes], zeros, which all ranks have mapped: collectives on it, and on parts of it, copy less.

        Every rank allocates the same in the same order. It stays when the group ends, and goes with its last view.
        Raises `CollectiveError` where there is no memory. That a rank is gone is the next call's to say.
        """
        self._check()
        descriptor, error = create_segment(size_bytes, name=window_name()), c_int()
        try:
            window = self._core.shoal_share(self._handle, descriptor, size_bytes, byref(error))
        finally:
            os.close(descriptor)
        if window is None:
            why = _WHY_NOT.get(error.value) or os.strerror(error.value)
            raise CollectiveError(f"cannot share {size_bytes} bytes with the group: {why}")
        memory = (c_uint8 * size_bytes).from_address(self._core.shoal_address(window))
        weakref.finalize(memory, self._core.shoal_release, window).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def peer(self, memory: Tensor, rank: int) -> Tensor:
        """uint8: the memory that `rank` got from the call of `allocate` that gave this rank `memory`, to read and write
        where it lies. All ranks have made that call. Raises `CollectiveError` where the memory of one is not here.
        """
        self._check()
        at = self._core.shoal_peer(self._handle, memory.data_ptr(), memory.nbytes, rank)
        if at is None:
            raise CollectiveError(
                f"these {memory.nbytes} bytes are no memory that all ranks of the group have allocated"
            )
        found = (c_uint8 * memory.nbytes).from_address(at)
        weakref.finalize(found, _let_go, memory).atexit = False  # this rank's own, with which both are unmapped
        return torch.frombuffer(found, dtype=torch.uint8)

    def collective(
        self, kind: Kind, send: Tensor | None, receive: Tensor | None, *, count: int, dtype: int = BYTES,
        reduction: int = 0, root: int = 0, sync: bool = False, outputs: Sequence[Tensor] = (),
        finish: Sequence[Callable[[], object]] = (), timeout_s: float | None = None,
    ) -> CoreWork | None:  # fmt: skip
        """Of contiguous tensors. `count` is the bytes of a block, where there are blocks, else of all. `sync`: the
        caller waits at once. `timeout_s`: of this call alone, which then gives a work."""
        timeout_s = self._limit_s if timeout_s is None else timeout_s
        if sync and timeout_s is None:
            out_of, into = _pointer(send), _pointer(receive)
            return self.at_once(kind, dtype, reduction, root, out_of, into, count, outputs, (send, receive), finish)
        self._check()
        self.calls += 1
        what = Signature(kind, dtype, reduction, root, count)
        handle = self._core.shoal_start(self._handle, byref(what), _pointer(send), _pointer(receive), False)
        return self._work(handle, Kept(outputs, (send, receive), finish), timeout_s=timeout_s)

    def at_once(
        self, kind: Kind, dtype: int, reduction: int, root: int, out_of: int, into: int, count: int,
        outputs: Sequence[Tensor], held: object = None, finish: Sequence[Callable[[], object]] = (),
    ) -> CoreWork | None:  # fmt: skip
        """One that its caller waits for at once, by the addresses of its memory. See `collective`."""
        if self._life.over:  # before any function is called: this is the shortest way
            self._check()
        self.calls += 1
        if self._call is None or self._limit_s is not None:
            what, kept = Signature(kind, dtype, reduction, root, count), Kept(outputs, held, finish)
            handle = self._core.shoal_start(self._handle, byref(what), out_of, into, True)
            in_time = self._prompt and self._limit_s is None
            return self._ended(handle, kept) if in_time else self._work(handle, kept)
        left: list[int | None] = []
        try:
            self._call(self._handle, kind, dtype, reduction, root, 0, out_of, into, count, left)
        except BaseException:
            if left:
                self._leave(left[0], Kept(outputs, held, finish))
            raise
        if left:
            return self._work(left[0], Kept(outputs, held, finish))
        for each in finish:
            each()
        if self._under_way:
            self._forget()
        return None

    def collective_of_lists(
        self, kind: Kind, send: Sequence[Tensor], receive: Sequence[Tensor], *, count: int, dtype: int = BYTES,
        reduction: int = 0, root: int = 0, sync: bool = False, outputs: Sequence[Tensor] = (),
        finish: Sequence[Callable[[], object]] = (),
    ) -> CoreWork | None:  # fmt: skip
        """The same of a tensor for each rank; one alone stands for all, and none for nothing."""
        self._check()
        self.calls += 1
        what = Signature(kind, dtype, reduction, root, count)
        handle = self._core.shoal_start_lists(
            self._handle, byref(what), *self._addresses(send), *self._addresses(receive), sync
        )  # fmt: skip
        kept = Kept(outputs, (send, receive), finish)
        in_time = sync and self._prompt and self._limit_s is None
        return self._ended(handle, kept) if in_time else self._work(handle, kept)

    def message(
        self, kind: Kind, tensor: Tensor, *, peer: int, tag: int, finish: Sequence[Callable[[], object]] = ()
    ) -> CoreWork:
        """`peer` -1: from whoever sends."""
        self._check()
        dtype, at = number_of(tensor), _pointer(tensor)
        handle = self._core.shoal_message(self._handle, kind, dtype, at, tensor.nbytes, peer, tag, False)
        return self._work(handle, Kept([tensor], tensor, finish), in_order=False)

    def _check(self) -> None:
        if self._life.over:
            raise RuntimeError("this group is closed")

    def _addresses(self, tensors: Sequence[Tensor]) -> tuple[ctypes.Array, ctypes.Array]:
        n = self.size
        if not tensors:
            return (c_void_p * n)(), (c_uint64 * n)()
        if len(tensors) == 1:
            tensors = [tensors[0]] * n
        return (c_void_p * n)(*map(_pointer, tensors)), (c_uint64 * n)(*(t.nbytes for t in tensors))

    def _ended(self, handle: int | None, kept: Kept) -> CoreWork | None:
        """None when the call is over; a work of one that takes long, or whose fault has to be found out."""
        if not handle:
            return self._work(handle, kept)
        try:
            self._forget()
            outcome = self._core.shoal_wait(handle, PATIENCE_S, True)
        except BaseException:
            self._leave(handle, kept)
            raise
        if outcome != CallState.DONE:
            return self._work(handle, kept)
        self._core.shoal_drop(handle)
        for each in kept.finish:
            each()
        return None

    def _leave(self, handle: int | None, kept: Kept) -> None:
        """A signal's exception has ended the wait for a call: the core goes on with it; its tensors have to live."""
        work = self._work(handle, kept)
        self._core.shoal_leave(handle)
        del work  # it held the handle

    def _work(
        self, handle: int | None, kept: Kept, *, in_order: bool = True, timeout_s: float | None = None
    ) -> CoreWork:
        if handle is None:
            self._check()
            raise RuntimeError("a group can be used by the process that made it only, and while there is memory")
        timeout_s = self._limit_s if timeout_s is None else timeout_s
        if timeout_s is not None and handle and in_order:
            self._core.shoal_limit(handle, timeout_s)
        work = CoreWork(
            self._core, handle, kept, rank=self.rank, timeout_s=timeout_s or self._timeout_s, futures=self._futures,
            under_way=self._under_way, in_order=in_order, own_limit=timeout_s is not None and not in_order,
        )  # fmt: skip
        self._remember(work)
        self._small.keep(work, kept.outputs)
        return work

    def _remember(self, work: CoreWork) -> None:
        """Works that nobody keeps must live, with their tensors, until they are over."""
        self._under_way[id(work)] = work
        self._forget()

    def _forget(self) -> None:
        """Lets go of works that are over and that nobody has waited for: looks at the next few in turn, so that one
        that takes long keeps no others. Threads may do it at the same time."""
        for _ in range(min(_LOOKED_AT, len(self._under_way))):
            with suppress(KeyError, RuntimeError, StopIteration):  # another thread has taken it
                key = next(iter(self._under_way))
                if not self._under_way[key].is_completed():  # else it is gone
                    self._under_way.move_to_end(key)


_NUMBERS = {getattr(torch, name): number for name, number in MOVED.items()}


def number_of(tensor: Tensor) -> int:
    """The core's number of its dtype, by which ranks see that they mean the same; `BYTES` where there is none."""
    return _NUMBERS.get(tensor.dtype, BYTES)


def _let_go(memory: Tensor) -> None:
    """Nobody needs `memory` any more."""


class _Life:
    """The end of a group in the core, once, and of its handle."""

    def __init__(
        self, core: Core, handle: int, under_way: UnderWay, small: SmallWorks, futures: FutureThreads
    ) -> None:  # fmt: skip
        self._core, self._handle, self._under_way, self._small, self._futures = core, handle, under_way, small, futures
        self._ending = threading.Lock()
        self.over = False

    def end(self) -> None:
        """After the calls that were made; they are refused from now on."""
        with self._ending:
            if not self.over:
                self.over = True
                self._core.shoal_end(self._handle)
                self._futures.close()
                self._under_way.clear()
                self._small.clear()

    def free(self) -> None:
        """When nobody can call any more."""
        self.end()
        self._core.shoal_free(self._handle)


def _pointer(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    if not tensor.is_cpu:
        raise ValueError(f"a tensor on {tensor.device}: ranks that share memory exchange tensors on the CPU")
    return tensor.data_ptr()
