"""`Group`: what ranks say to each other in arrays, whatever framework they come from.

Calls block, and are made by all ranks of the group in the same order; they return NumPy arrays, which JAX, torch and
TensorFlow take without a copy (`jax.dlpack.from_dlpack`, `torch.from_numpy`). `out` is memory for the result, also the
array that is sent. Threads of a rank take turns: the group is not for two at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from shoal.comm.ledger import Ledger, Sent
from shoal.errors import UsageError
from shoal.wire.arrays import Array, apart, mark, readable, reduction_numbers, writable
from shoal.wire.codecs import Codec

Reduction = Literal["sum", "avg", "max", "min", "product"]
_REDUCTIONS = ("sum", "avg", "max", "min", "product")


class Transport(Protocol):
    """Arrays in one piece between ranks. Each call says what this rank sent, and raises `CollectiveError`.

    `mark` says what else of the arrays is alike on all ranks (`arrays.mark`); 0: nothing.
    """

    rank: int
    size: int

    def all_reduce(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent: ...
    def reduce_scatter(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent: ...
    def all_gather(self, send: Array, receive: Array, mark: int = 0) -> Sent: ...
    def broadcast(self, array: Array, root: int, mark: int = 0) -> Sent: ...
    def all_to_all(self, send: Sequence[Array], receive: Sequence[Array], mark: int = 0) -> Sent: ...
    def send(self, array: Array, to: int, tag: int) -> Sent: ...
    def receive(self, array: Array, source: int, tag: int) -> Sent: ...
    def barrier(self) -> Sent: ...
    def close(self) -> None: ...


class Group:
    """Ranks `0 .. size - 1`, of which this process is `rank`; `hosts` are those of all ranks, in rank order.

    `ledger` counts calls, bytes and seconds by operation. All methods raise `UsageError` for what is no array, or the
    wrong one, and `CollectiveError` where another rank is gone, late, or makes another call.
    """

    def __init__(self, transport: Transport, hosts: Sequence[str], *, local_rank: int = 0) -> None:
        self.rank, self.size, self.local_rank = transport.rank, transport.size, local_rank
        self.hosts, self.ledger = tuple(hosts), Ledger()
        self._transport, self.closed, self._busy = transport, False, False

    def all_reduce(self, array: Any, op: Reduction = "sum", *, out: Any = None, codec: Codec | None = None) -> Array:
        """The sum, mean, ... of the ranks' arrays, element by element: the same bits on all ranks.

        `codec` says what the numbers become on the wire: each rank's array is encoded once, and the decoded arrays are
        summed in rank order (float32 and float64 only, `op` "sum" or "avg").
        """
        send = readable(array)
        _check_reduction(op)
        receive, then = writable(out, like=send, shape=send.shape)
        if codec is not None:
            self._coded(send, receive, op, codec)
        else:
            reduction_numbers(send.dtype, op)
            if out is not None and send is not receive:
                send = apart(send, receive)
            self._book("all_reduce", self._transport.all_reduce, send, receive, op, mark(send.dtype, send.shape))
        then()
        return receive if out is None else out

    def reduce_scatter(self, array: Any, op: Reduction = "sum", *, out: Any = None) -> Array:
        """Of arrays `[size * n, ...]`, this rank's part `[n, ...]` of the sum."""
        send = readable(array)
        _check_reduction(op)
        reduction_numbers(send.dtype, op)
        self._check_blocks("reduce_scatter", send)
        receive, then = writable(out, like=send, shape=(send.shape[0] // self.size, *send.shape[1:]))
        send = send if out is None else apart(send, receive, at=self.rank * receive.nbytes)
        self._book("reduce_scatter", self._transport.reduce_scatter, send, receive, op, mark(send.dtype, send.shape))
        then()
        return receive if out is None else out

    def all_gather(self, array: Any, *, out: Any = None) -> Array:
        """The ranks' arrays `[...]`, which are alike, as `[size, ...]`."""
        send = readable(array)
        receive, then = writable(out, like=send, shape=(self.size, *send.shape))
        send = send if out is None else apart(send, receive, at=-self.rank * send.nbytes)
        self._book("all_gather", self._transport.all_gather, send, receive, mark(send.dtype, send.shape))
        then()
        return receive if out is None else out

    def broadcast(self, array: Any, *, root: int = 0, out: Any = None) -> Array:
        """The array of `root`. The others pass one of the same shape and dtype, whose content does not matter."""
        self._check_rank("broadcast", root)
        send = readable(array)
        receive, then = writable(out, like=send, shape=send.shape)
        if self.rank == root:
            np.copyto(receive, send)
        self._book("broadcast", self._transport.broadcast, receive, root, mark(send.dtype, send.shape))
        then()
        return receive if out is None else out

    def all_to_all(self, arrays: Any, *, out: Any = None) -> Array:
        """Of arrays `[size, ...]`: row q goes to rank q. Returns what came, row q from rank q."""
        send = readable(arrays)
        if send.ndim == 0 or send.shape[0] != self.size:
            raise UsageError(f"all_to_all of {list(send.shape)}: it takes one row for each of {self.size} ranks")
        receive, then = writable(out, like=send, shape=send.shape)
        send = send.copy() if out is not None and np.may_share_memory(send, receive) else send
        blocks = (list(send.reshape(self.size, -1)), list(receive.reshape(self.size, -1)))
        self._book("all_to_all", self._transport.all_to_all, *blocks, mark(send.dtype, send.shape))
        then()
        return receive if out is None else out

    def all_to_all_uneven(self, arrays: Sequence[Any]) -> list[Array]:
        """`arrays[q]`, one-dimensional and of any length, to rank q; those that came, by rank. All of one dtype."""
        send = [readable(array) for array in arrays]
        if len(send) != self.size or any(array.ndim != 1 or array.dtype != send[0].dtype for array in send):
            raise UsageError(
                f"all_to_all_uneven takes {self.size} one-dimensional arrays of one dtype, one for each rank"
            )
        counts = self.all_to_all(np.array([len(array) for array in send], np.int64))
        receive = [np.empty(count, send[0].dtype) for count in counts]
        self.exchange(send, receive)
        return receive

    def exchange(self, send: Sequence[Array], receive: Sequence[Array]) -> None:
        """`send[q]` to rank q, and what it sends into `receive[q]`: NumPy arrays in one piece, of known sizes."""
        self._book("all_to_all", self._transport.all_to_all, send, receive)

    def send(self, array: Any, *, to: int, tag: int = 0) -> None:
        """To rank `to`, which receives an array of the same size with the same tag."""
        self._check_peer("send", to, tag)
        content = readable(array)
        self._book("send", self._transport.send, content, to, tag)

    def receive(self, out: Any, *, source: int, tag: int = 0) -> Any:
        """Writes what rank `source` sends into `out`, and returns it."""
        self._check_peer("receive", source, tag)
        like = readable(out)
        target, then = writable(out, like=like, shape=like.shape)
        self._book("receive", self._transport.receive, target, source, tag)
        then()
        return out

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        self._book("barrier", self._transport.barrier)

    def close(self) -> None:
        """Ends the group. Ranks that call it later are told that this one has left."""
        self.closed = True
        self._transport.close()

    def _coded(self, send: Array, receive: Array, op: str, codec: Codec) -> None:
        if op not in ("sum", "avg") or send.dtype not in (np.float32, np.float64):
            raise UsageError(f"{op!r} of {send.dtype} through a codec: it sums float32 or float64; leave the codec out")
        payload = codec.encode(send.reshape(-1))
        everyone = np.empty((self.size, payload.nbytes), np.uint8)
        like = mark(send.dtype, send.shape, type(codec).__name__)
        self._book("all_reduce", self._transport.all_gather, payload, everyone, like)
        total = codec.decode(everyone[0], send.size, send.dtype)
        for row in everyone[1:]:
            total += codec.decode(row, send.size, send.dtype)
        if op == "avg":
            total /= self.size
        receive.reshape(-1)[...] = total

    def _book(self, operation: str, call: Callable[..., Sent], *given: Any) -> None:
        """Makes the call, and counts it. Raises `UsageError` where another thread is in one: on other ranks their order
        may be the other one.
        """
        if self._busy:
            raise UsageError(f"{operation} while another thread of rank {self.rank} uses the group: take turns")
        self._busy = True  # no lock: a small call takes 4 us
        try:
            begin_s = time.perf_counter()
            sent = call(*given)
            self.ledger.made(operation, sent, time.perf_counter() - begin_s)
        finally:
            self._busy = False

    def _check_blocks(self, operation: str, array: Array) -> None:
        if array.ndim == 0 or array.shape[0] % self.size:
            raise UsageError(
                f"{operation} of {list(array.shape)}: its first dimension is divided over {self.size} ranks; pad it"
            )

    def _check_rank(self, operation: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"{operation}: there is no rank {rank} in a group of {self.size}")

    def _check_peer(self, operation: str, rank: int, tag: int) -> None:
        self._check_rank(operation, rank)
        if not 0 <= tag < 1 << 63:
            raise UsageError(f"{operation}: the tag {tag} is none of 0 to 2^63 - 1")
        if rank == self.rank:
            raise UsageError(f"{operation}: rank {rank} is this rank itself; copy the array instead")


class Alone:
    """The transport of a process alone."""

    rank, size = 0, 1

    def all_reduce(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent:
        return _copied(send, receive)

    def reduce_scatter(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent:
        return _copied(send, receive)

    def all_gather(self, send: Array, receive: Array, mark: int = 0) -> Sent:
        return _copied(send, receive)

    def broadcast(self, array: Array, root: int, mark: int = 0) -> Sent:
        return Sent()

    def all_to_all(self, send: Sequence[Array], receive: Sequence[Array], mark: int = 0) -> Sent:
        return _copied(send[0], receive[0])

    def send(self, array: Array, to: int, tag: int) -> Sent:
        raise UsageError("a group of one rank has nobody to send to")

    def receive(self, array: Array, source: int, tag: int) -> Sent:
        raise UsageError("a group of one rank has nobody to receive from")

    def barrier(self) -> Sent:
        return Sent()

    def close(self) -> None:
        """Nothing is open."""


def _copied(send: Array, receive: Array) -> Sent:
    receive.reshape(-1)[...] = send.reshape(-1)
    return Sent()


def _check_reduction(op: str) -> None:
    if op not in _REDUCTIONS:
        raise UsageError(f"there is no reduction {op!r}: it is one of {', '.join(_REDUCTIONS)}")
