"""`Group`: what ranks say to each other in arrays, whatever framework they come from.

Calls block, and are made by all ranks of the group in the same order; they return NumPy arrays, which JAX, torch and
TensorFlow take without a copy (`jax.dlpack.from_dlpack`, `torch.from_numpy`). `out` is memory for the result, also the
array that is sent. Threads of a rank take turns: the group is not for two at once.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

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


# Which way to sum, while links change: chosen by what the last sums took, alike on all ranks.
#
#     reducer = wire.Adaptive(group, {"plain": None, "int8": wire.Int8()})
#     mean = reducer.all_reduce(gradient, op="avg")
#
# A way w puts b_w bytes on the wire and takes c_w seconds to code, both known; the rate r of the link is what is not:
#
#     t_w = c_w + b_w / r
#
# Every sum, by whichever way, shows r, a long message better than a short one. So a change of the link is answered
# without trials: the way with the smallest t_w is next, if it saves more than `gain`. Of a way that has been used on
# this link the median of its last `window` sums counts instead, so that a prediction which was wrong is believed once.
# The link is another one where an exchange takes twice as long as that way's last ones, or half, and that is more than
# `NOTABLE` of a sum. Regret against the best way of each phase: a sum by the old way after a change, a sum by each way
# whose prediction was wrong, and `gain` of the time.
#
# All ranks choose alike, because they agree on the numbers of a sum with the next one: the longest coding, and the
# shortest exchange, which is that of the rank that came last and waited for nobody, less what a message without content
# takes (such is the agreement itself). The choices follow from these numbers alone (`log`).


class Way(NamedTuple):
    """What a sum costs: bytes that a rank sends, seconds that it codes."""

    sent_bytes: float
    coding_s: float


class Sum(NamedTuple):
    """What a sum took: seconds of its exchange, and of its coding."""

    exchange_s: float
    coding_s: float


NOTABLE, OTHER = 0.25, 2.0


class Choice:
    """Of `ways`, by name; begins with the first, or with the best at `bytes_s` bytes a second. Pure: it is told
    seconds, and reads no clock.
    """

    def __init__(
        self, ways: Mapping[str, Way], *, window: int = 3, gain: float = 0.05, bytes_s: float | None = None
    ) -> None:
        if not ways or window < 1:
            raise UsageError(f"a choice of {len(ways)} ways by {window} sums: give one or more of both")
        self._ways, self._gain, self._window = dict(ways), gain, window
        self._sums: dict[str, deque[Sum]] = {}
        self._bytes_s = bytes_s
        self.name = next(iter(ways))
        self.changes = 0
        if bytes_s is not None:
            self.name = self._best()

    def note(self, exchange_s: float, coding_s: float) -> None:
        """What a sum by `name` took; `name` is then the way of the next one."""
        found = Sum(exchange_s, coding_s)
        if self._is_another_link(found):
            self._sums.clear()
            self._bytes_s = None
        self._ways[self.name] = self._ways[self.name]._replace(coding_s=coding_s)
        self._sums.setdefault(self.name, deque(maxlen=self._window)).append(found)
        best = self._best()
        if self.predicted_s(best) < (1 - self._gain) * self.predicted_s(self.name):
            self.name = best
            self.changes += 1

    def predicted_s(self, name: str) -> float:
        """Seconds of a sum by that way on the link as it is."""
        if name in self._sums:
            return statistics.median(each.exchange_s + each.coding_s for each in self._sums[name])
        way = self._ways[name]
        return way.coding_s + way.sent_bytes / self._rate()

    def _best(self) -> str:
        return min(self._ways, key=self.predicted_s)

    def _rate(self) -> float:
        """Bytes a second: by the longest message that this link has carried."""
        if not self._sums:
            assert self._bytes_s is not None, "asked before the first sum without a rate"
            return self._bytes_s
        longest = max(self._sums, key=lambda name: self._ways[name].sent_bytes)
        exchange_s = statistics.median(each.exchange_s for each in self._sums[longest])
        return self._ways[longest].sent_bytes / max(exchange_s, 1e-9)

    def _is_another_link(self, found: Sum) -> bool:
        before = self._sums.get(self.name)
        if before is None:
            return False
        usual_s = max(statistics.median(each.exchange_s for each in before), 1e-9)
        notable = abs(found.exchange_s - usual_s) > NOTABLE * min(sum(found), usual_s + found.coding_s)
        return notable and not 1 / OTHER < found.exchange_s / usual_s < OTHER


SAMPLE, PROBE = 8, 1 << 16
"""One part of so many of an array is coded to see what coding takes; so many numbers are summed to see the rate."""


class Adaptive:
    """Sums of vectors of one length over `group`, by one of `ways`: a codec by name, None for none.

    All ranks make the same calls. `log` has (way, exchange_s, coding_s) of every sum but the last.
    """

    def __init__(self, group: Group, ways: Mapping[str, Codec | None], **settings: Any) -> None:
        self._group, self._codecs, self._settings = group, dict(ways), settings
        self.choice: Choice | None = None
        self.log: list[tuple[str, float, float]] = []
        self._last: tuple[float, float] | None = None
        self._empty_s = 0.0
        self._numel = 0

    def all_reduce(self, array: Any, op: Reduction = "sum", *, out: Any = None) -> Array:
        """See `Group.all_reduce`. One small message more, in which ranks agree on what the last sum took."""
        given = readable(array)
        if self.choice is None:
            self.choice, self._numel = self._first_choice(given), given.size
        if given.size != self._numel:
            raise UsageError(f"an adaptive sum of {given.size} numbers, after {self._numel}: use one for each length")
        if self._last is not None:
            self._agree(self.choice, *self._last)
        waited_s, begin_s = self._group.ledger.total().exposed_s, time.perf_counter()
        found = self._group.all_reduce(given, op, out=out, codec=self._codecs[self.choice.name])
        whole_s = time.perf_counter() - begin_s
        exchange_s = self._group.ledger.total().exposed_s - waited_s
        self._last = exchange_s, max(0.0, whole_s - exchange_s)
        return found

    def _agree(self, choice: Choice, own_exchange_s: float, own_coding_s: float) -> None:
        """All ranks on what the last sum took, and on the way of the next one."""
        begin_s = time.perf_counter()
        said = np.array([own_coding_s, -own_exchange_s, -self._empty_s])
        coding_s, less_exchange_s, less_empty_s = map(float, self._group.all_reduce(said, op="max"))
        self._empty_s = time.perf_counter() - begin_s
        exchange_s = max(-less_exchange_s + less_empty_s, -less_exchange_s / 2)
        self.log.append((choice.name, exchange_s, coding_s))
        choice.note(exchange_s, coding_s)

    def _first_choice(self, given: Array) -> Choice:
        """By what coding a part of such an array takes, and by a short sum; the slowest rank's seconds count."""
        ranks, share = self._group.size, 2 * (self._group.size - 1) / self._group.size
        ways: dict[str, Way] = {}
        for name, codec in self._codecs.items():
            ways[name] = Way(share * given.nbytes, 0.0)
            if codec is not None:
                payload_bytes, coding_s = _coded_part(_fresh(codec), given, ranks=ranks)
                ways[name] = Way((ranks - 1) * payload_bytes, coding_s)
        probe = np.zeros(max(1, min(PROBE, given.nbytes // 4)), np.float32)
        self._group.barrier()
        begin_s = time.perf_counter()
        self._group.all_reduce(probe)
        own_s = [time.perf_counter() - begin_s, *(way.coding_s for way in ways.values())]
        probe_s, *coding_s = map(float, self._group.all_reduce(np.array(own_s), op="max"))
        agreed = {name: way._replace(coding_s=s) for (name, way), s in zip(ways.items(), coding_s, strict=True)}
        return Choice(agreed, bytes_s=max(share * probe.nbytes, 1.0) / max(probe_s, 1e-9), **self._settings)


def _coded_part(codec: Codec, given: Array, *, ranks: int) -> tuple[float, float]:
    """(bytes of a payload, seconds of encoding it and decoding those of all ranks), by a part of the array."""
    part = given.reshape(-1)[: -(-given.size // SAMPLE)]
    scale = given.size / max(part.size, 1)
    begin_s = time.perf_counter()
    payload = codec.encode(part)
    for _ in range(ranks):
        codec.decode(payload, part.size, part.dtype)
    return scale * payload.nbytes, scale * (time.perf_counter() - begin_s)


def _fresh(codec: Codec) -> Codec:
    """`codec` without what it remembers, for a trial."""
    return getattr(codec, "codec", codec)
