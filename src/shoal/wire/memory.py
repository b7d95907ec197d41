"""`SharedMemory`: the ranks of one host, through the same core in C that carries PyTorch's tensors (`shoal.comm.shm`).

A call is carried out by the rank that makes it, and has ended when it returns. Sums go from left to right in rank
order, 16-bit floats in float32: the same bits as `shoal.c10d` gives, whoever of the ranks has torch.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_uint64, c_void_p

from shoal.comm.ledger import Sent
from shoal.comm.shm.core import (
    BYTES,
    REDUCTIONS,
    CallState,
    Fault,
    Kind,
    Signature,
    core_settings,
    load_call,
    load_core,
    sentence,
)
from shoal.comm.shm.host import Meeting, find_mates
from shoal.errors import CollectiveError
from shoal.wire.arrays import Array, address, dtype_number, reduction_numbers

_PATIENCE_S = 0.1  # before a look whether somebody has pressed Ctrl-C


class SharedMemory:
    """Blocks until all ranks have made it; `timeout_s` is that of later calls. Raises `Apart` or `CoreMissing` on all
    of them alike.

    All methods take arrays in one piece, say what they sent, and raise `CollectiveError` where a rank is gone, late or
    calls something else.
    """

    def __init__(self, board: Meeting, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        threads = max(1, int(os.environ.get("OMP_NUM_THREADS") or 1))
        settings = core_settings(size, timeout_s=timeout_s, threads=threads)
        mates = find_mates(board, rank, size, settings=settings)
        self._core, self._call = load_core(), load_call()
        streams = [mates.streams[q].detach() if q in mates.streams else -1 for q in range(size)]
        segments = (c_void_p * size)(*(segment.hand_over() for segment in mates.segments))
        handle = self._core.shoal_open(rank, size, segments, (c_int * size)(*streams), byref(settings))
        if handle is None:
            raise MemoryError("no memory for a group")
        self._handle: int = handle
        self._left: list[object] = []  # memory of calls that a signal has interrupted
        self._end = weakref.finalize(self, _end, self._core, handle)
        self._end.atexit = False  # the kernel tidies up after a process

    def close(self) -> None:
        """Ends the group: later calls of the others say that this rank has left."""
        self._end()

    def all_reduce(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent:
        self._reduce(Kind.ALL_REDUCE, send, receive, op, send.nbytes, mark)
        return Sent(2 * send.nbytes * (self.size - 1) // self.size)

    def reduce_scatter(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent:
        self._reduce(Kind.REDUCE_SCATTER, send, receive, op, receive.nbytes, mark)
        return Sent(receive.nbytes * (self.size - 1))

    def all_gather(self, send: Array, receive: Array, mark: int = 0) -> Sent:
        dtype = dtype_number(send.dtype)
        self._collective(Kind.ALL_GATHER, send, receive, count=send.nbytes, dtype=dtype, mark=mark)
        return Sent(send.nbytes * (self.size - 1))

    def broadcast(self, array: Array, root: int, mark: int = 0) -> Sent:
        dtype = dtype_number(array.dtype)
        self._collective(Kind.BROADCAST, array, array, count=array.nbytes, dtype=dtype, root=root, mark=mark)
        return Sent(array.nbytes * (self.size - 1) if self.rank == root else 0)

    def all_to_all(self, send: Sequence[Array], receive: Sequence[Array], mark: int = 0) -> Sent:
        what = Signature(Kind.ALL_TO_ALL, dtype_number(send[0].dtype), 0, 0, 0, mark)
        handle = self._core.shoal_start_lists(self._open(), byref(what), *_list(send), *_list(receive), True)
        self._finish(handle, (send, receive))
        return Sent(sum(block.nbytes for rank, block in enumerate(send) if rank != self.rank))

    def barrier(self) -> Sent:
        self._collective(Kind.BARRIER, None, None, count=0)
        return Sent()

    def send(self, array: Array, to: int, tag: int) -> Sent:
        self._message(Kind.SEND, array, to, tag)
        return Sent(array.nbytes)

    def receive(self, array: Array, source: int, tag: int) -> Sent:
        self._message(Kind.RECV, array, source, tag)
        return Sent()

    def _reduce(self, kind: Kind, send: Array, receive: Array, op: str, count: int, mark: int) -> None:
        dtype = reduction_numbers(send.dtype, op)
        self._collective(kind, send, receive, count=count, dtype=dtype, reduction=REDUCTIONS.index(op), mark=mark)

    def _collective(
        self, kind: Kind, send: Array | None, receive: Array | None, *, count: int, dtype: int = BYTES,
        reduction: int = 0, root: int = 0, mark: int = 0,
    ) -> None:  # fmt: skip
        if self._call is None:
            what = Signature(kind, dtype, reduction, root, count, mark)
            addresses = (0 if array is None else address(array) for array in (send, receive))
            self._finish(self._core.shoal_start(self._open(), byref(what), *addresses, True), (send, receive))
            return
        left: list[int | None] = []
        try:
            self._call(self._open(), kind, dtype, reduction, root, mark, _memory(send), _memory(receive), count, left)
        except BaseException:
            self._leave(left[0] if left else None, (send, receive))
            raise
        if left:
            self._finish(left[0], (send, receive))

    def _message(self, kind: Kind, array: Array, peer: int, tag: int) -> None:
        dtype, at = dtype_number(array.dtype), address(array)
        handle = self._core.shoal_message(self._open(), kind, dtype, at, array.nbytes, peer, tag, False)
        if handle:
            self._core.shoal_limit(handle, self._timeout_s)
        self._finish(handle, array)

    def _open(self) -> int:
        if not self._end.alive:
            raise CollectiveError("this group is closed: make another")
        return self._handle

    def _finish(self, handle: int | None, held: object) -> None:
        """Waits for a call to end; `held` is its memory."""
        if not handle:
            raise CollectiveError("a group can be used by the process that made it only, and while there is memory")
        outcome = CallState.PENDING
        try:
            while outcome == CallState.PENDING:
                outcome = self._core.shoal_wait(handle, _PATIENCE_S, True)
        except BaseException:
            self._leave(handle, held)
            raise
        try:
            if outcome != CallState.DONE:
                raise CollectiveError(self._failure(handle, outcome))
        finally:
            self._core.shoal_drop(handle)

    def _leave(self, handle: int | None, held: object) -> None:
        """A signal's exception has ended the wait: the core goes on with the call, whose memory has to live."""
        if handle:
            self._left.append(held)
            self._core.shoal_leave(handle)
            self._core.shoal_drop(handle)

    def _failure(self, handle: int, outcome: int) -> str:
        if outcome == CallState.FOREIGN:
            return "a group can be used by the process that made it only"
        fault, culprit, peer = c_int(), c_int(), c_int()
        ours, theirs = Signature(), Signature()
        self._core.shoal_report(handle, fault, culprit, ours, theirs, peer)
        return sentence(Fault(fault.value), culprit.value, ours, theirs, own=self.rank, timeout_s=self._timeout_s)


def _end(core: ctypes.CDLL, handle: int) -> None:
    core.shoal_end(handle)
    core.shoal_free(handle)


def _memory(array: Array | None) -> Array | int:
    """What `call` takes: the array itself where it has the buffer protocol, which is faster, else its address."""
    if array is None:
        return 0
    return array if array.dtype.kind in "biufc" else address(array)


def _list(arrays: Sequence[Array]) -> tuple[ctypes.Array, ctypes.Array]:
    n = len(arrays)
    return (c_void_p * n)(*map(address, arrays)), (c_uint64 * n)(*(array.nbytes for array in arrays))
