"""Three ways to add up vectors of which less is sent, between n ranks that each hold m numbers.

    way          for                                                     bytes a rank sends
    all-reduce   linear codecs: payloads are summed on the way           those of all-reduces of w(m) in all
    gather       others: all payloads go to all ranks, which add them    (n - 1) w(m)
    two-shot     others: rank r gets part r of all, adds, encodes the    2 (n - 1) w(m / n)
                 sum once more, and sends that to all

w are a codec's `wire_bytes`. Of the last two the one that sends less is taken, gather if they send the same. Every rank
decodes the same bytes in the same order, so all have the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Payload, pack, unpack
from shoal.comm.collective import Collective, Handle
from shoal.comm.exchanges.exchange import Segment
from shoal.maths.counter import key_of
from shoal.maths.norm import two_norm


class Coding(NamedTuple):
    """Seconds of coding, and squared norms: `term` is what was to be sent, `error` what was not."""

    encode_s: float = 0.0
    decode_s: float = 0.0
    term: float = 0.0
    error: float = 0.0


class Spent:
    """Adds up what coding costs. `take` returns the sum and starts again from nothing. Several threads may use it."""

    def __init__(self) -> None:
        self._total, self._lock = Coding(), threading.Lock()

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Around an encoding, with what follows from it on this rank."""
        begin_s = time.perf_counter()
        yield
        self.add(Coding(encode_s=time.perf_counter() - begin_s))

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Around a decoding of what has come."""
        begin_s = time.perf_counter()
        yield
        self.add(Coding(decode_s=time.perf_counter() - begin_s))

    def add(self, more: Coding) -> None:
        with self._lock:
            self._total = Coding(*(one + other for one, other in zip(self._total, more, strict=True)))

    def take(self) -> Coding:
        with self._lock:
            taken, self._total = self._total, Coding()
        return taken


class CodedSum(Protocol):
    """One sum after the other; each is `send`, `advance` and `wait`."""

    def send(self, term: Tensor, *, residual: bool, key: int) -> None:
        """Starts to send `term` `[numel]`. `key` is that of this sum, the same on all ranks.

        With `residual`, `term` holds after `wait` what was not sent of it; otherwise it may be the result's memory.
        """
        ...

    def advance(self) -> None:
        """Waits for what was sent first, and starts what follows."""
        ...

    def wait(self) -> None:
        """Writes the sum, the same bits on all ranks, into the result."""
        ...


def coded_sum(codec: Codec, group: Collective, result: Tensor, spent: Spent, *, later: Collective) -> CodedSum:
    """The way that sends least, to the sum in `result` `[numel]`. `spent` is added to.

    What follows on the first round goes over `later`: `group`, or another group of the same ranks, if the second round
    of one sum and the first of another may start in any order.
    """
    if group.size == 1:
        return _Alone(result)
    if codec.linear:
        return _AllReduced(codec, group, result, spent, later)
    part = -(-result.numel() // group.size)
    if 2 * codec.wire_bytes(part) < codec.wire_bytes(result.numel()):
        return _TwoShot(codec, group, result, spent, later, part=part)
    return _Gathered(codec, group, result, spent)


def as_it_is(group: Collective, result: Tensor) -> CodedSum:
    """The sum without a codec."""
    return _AsItIs(group, result)


class _AsItIs:
    """An all-reduce of the term, in the result's memory."""

    def __init__(self, group: Collective, result: Tensor) -> None:
        self._group, self._result = group, result

    def send(self, term: Tensor, *, residual: bool, key: int) -> None:
        if term.data_ptr() != self._result.data_ptr():
            self._result.copy_(term)
        self._handle = self._group.all_reduce(self._result)

    def advance(self) -> None:
        """Nothing follows."""

    def wait(self) -> None:
        self._handle.wait()


class _Alone:
    """One rank: all is sent, and nothing is left."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def send(self, term: Tensor, *, residual: bool, key: int) -> None:
        self._sum = term.clone()
        if residual:
            term.zero_()

    def advance(self) -> None:
        """Nothing follows."""

    def wait(self) -> None:
        self._result.copy_(self._sum)


class _AllReduced:
    """Payloads are summed on the way, in as many rounds as the codec asks for."""

    def __init__(self, codec: Codec, group: Collective, result: Tensor, spent: Spent, later: Collective) -> None:
        self._codec, self._group, self._result, self._spent, self._later = codec, group, result, spent, later
        self._handles: list[Handle] = []

    def send(self, term: Tensor, *, residual: bool, key: int) -> None:
        self._total = self._result if self._result.dtype == term.dtype else torch.empty_like(term)
        self._rounds = self._codec.summing_into(term, self._total, key=key, residual=residual)
        with self._spent.encoding():
            payload = next(self._rounds)
        self._reduce(payload, self._group)
        self._advanced = self._over = False

    def advance(self) -> None:
        if not self._advanced:
            self._advanced, self._over = True, not self._next_round()

    def wait(self) -> None:
        while not self._over:
            self._over = not self._next_round()
        if self._total is not self._result:
            self._result.copy_(self._total)

    def _next_round(self) -> bool:
        """Waits for a round and starts the next; False where that was the last one."""
        for handle in self._handles:
            handle.wait()
        with self._spent.decoding():
            payload = next(self._rounds, None)
        if payload is not None:
            self._reduce(payload, self._later)
        return payload is not None

    def _reduce(self, payload: Payload, group: Collective) -> None:
        self._handles = [group.all_reduce(part) for part in payload if part.numel()]


class _Gathered:
    """Every payload goes to every rank."""

    def __init__(self, codec: Codec, group: Collective, result: Tensor, spent: Spent) -> None:
        self._codec, self._group, self._result, self._spent = codec, group, result, spent

    def send(self, term: Tensor, *, residual: bool, key: int) -> None:
        self._dtype = term.dtype
        with self._spent.encoding():
            payload = self._codec.encode(term, key=key_of(key, self._group.rank))
            if residual:
                term.sub_(_decoded(self._codec, payload, term))
            packed = pack(self._codec, payload)
        self._rows = packed.new_empty(self._group.size, packed.numel())
        self._handle = self._group.all_gather(self._rows.view(-1), packed)

    def advance(self) -> None:
        """Nothing follows."""

    def wait(self) -> None:
        self._handle.wait()
        with self._spent.decoding():
            total = self._result.new_empty(self._result.numel(), dtype=self._dtype)
            self._result.copy_(_sum_of(self._codec, self._rows, total))


class _TwoShot:
    """Rank r adds the parts r of all ranks, `part` numbers each, and tells all the sum.

    What its encoding of the sum leaves out becomes a part of this rank's error.
    """

    def __init__(
        self, codec: Codec, group: Collective, result: Tensor, spent: Spent, later: Collective, *, part: int
    ) -> None:
        self._codec, self._group, self._result, self._spent, self._part = codec, group, result, spent, part
        self._later = later

    def send(self, term: Tensor, *, residual: bool, key: int) -> None:
        size, self._error = self._group.size, term if residual else None
        self._key = key_of(key, self._group.rank)
        self._like = torch.empty(self._part, dtype=term.dtype, device=term.device)
        with self._spent.encoding():
            filled = torch.nn.functional.pad(term, (0, size * self._part - term.numel())).view(size, self._part)
            payloads = [self._codec.encode(part, key=key_of(self._key, to)) for to, part in enumerate(filled)]
            if residual:
                sent = torch.cat([_decoded(self._codec, payload, self._like) for payload in payloads])
                term.sub_(sent[: term.numel()])
            mine = torch.stack([pack(self._codec, payload) for payload in payloads])
        self._rows, self._summed = torch.empty_like(mine), False
        self._handle = self._group.all_to_all(self._rows.view(-1), mine.view(-1))

    def advance(self) -> None:
        if self._summed:
            return
        self._summed = True
        self._handle.wait()
        with self._spent.decoding():
            summed = _sum_of(self._codec, self._rows, self._like)
        with self._spent.encoding():
            payload = self._codec.encode(summed, key=key_of(self._key, "sum"))
            if self._error is not None:
                mine = self._error[self._part * self._group.rank :][: self._part]
                mine.add_((summed - _decoded(self._codec, payload, summed))[: mine.numel()])
            packed = pack(self._codec, payload)
        self._handle = self._later.all_gather(self._rows.view(-1), packed)

    def wait(self) -> None:
        self.advance()
        self._handle.wait()
        with self._spent.decoding():
            for row, place in zip(self._rows, self._result.split(self._part), strict=False):
                part = _decoded(self._codec, unpack(self._codec, row, self._part), self._like)
                place.copy_(part[: place.numel()])


def _decoded(codec: Codec, payload: Payload, like: Tensor) -> Tensor:
    """Of a codec that is not linear, whose decoding needs no key."""
    return codec.decode(payload, like.numel(), dtype=like.dtype)


def _sum_of(codec: Codec, rows: Tensor, like: Tensor) -> Tensor:
    """The sum, in the order of ranks, of the packed payloads `rows` `[ranks, bytes]` of vectors as long as `like`."""
    total = torch.zeros_like(like)
    for row in rows:
        total.add_(_decoded(codec, unpack(codec, row, like.numel()), like))
    return total


# `CodedPushes`: what one worker sends to parameter servers, coded. Each server gets its span of the gradient.
#
#     c = g + e                        this worker's gradient, and what it has not sent so far
#     server s decodes encode(c[s])
#     e = c - decode(encode(c))        error feedback (arXiv:1901.09847, algorithm 2), span by span
#
# Nobody sums on the way, so a codec must stand for one vector alone. A residual counts as soon as its push has left: a
# server that drops a late contribution drops it as it would drop the gradient itself. The random numbers of a push
# follow from the run's seed, the worker, the server and the number of the push, which goes along with it.


class Pusher(NamedTuple):
    """The `rank`th of `size` ranks that push; -1: this one never does."""

    rank: int
    size: int


class CodedPushes:
    """Pushes of rank `rank`, one of `pushers` if it does push, of gradients in which `segments` lie; and what it
    decodes of others'.

    `feedback`: keep what was not sent, in float32 at least. `rounds` counts pushes, and `updates` as many. `spent` is
    added to.
    """

    def __init__(
        self, codec: Codec, rank: int, pushers: Sequence[int], segments: Sequence[Segment], *,
        dtype: torch.dtype, feedback: bool, seed: int, spent: Spent,
    ) -> None:  # fmt: skip
        self.group = Pusher(pushers.index(rank) if rank in pushers else -1, len(pushers))
        self.segments, self.feedback, self.rounds = tuple(segments), feedback, 0
        self._residual: Tensor | None = None
        self._rank, self._codec, self._seed, self._spent = rank, codec, seed, spent
        self._term = torch.zeros(0, dtype=torch.promote_types(dtype, torch.float32))
        self._packed: dict[int, Tensor] = {}
        self._arrivals: list[Tensor] = []

    @property
    def updates(self) -> int:
        """A push that has left counts."""
        return self.rounds

    @updates.setter
    def updates(self, value: int) -> None:
        self.rounds = value

    @property
    def residual(self) -> Tensor | None:
        """What this rank has not sent so far, `[numel]`; None if there is nothing."""
        while self._arrivals:
            arrived = self._arrivals.pop()
            self._residual = arrived if self._residual is None else self._residual.add_(arrived)
        return self._residual

    @property
    def state(self) -> Mapping[str, Tensor]:
        """A codec of one vector learns nothing."""
        return {}

    def arrival(self) -> Tensor:
        """A tensor `[numel]` of zeros; what is written into it is added to the residual before the next push."""
        self._arrivals.append(self._zeros())
        return self._arrivals[-1]

    def hand_over(self, replicas: Collective, *, leaving: bool) -> None:
        """Between two rounds: ranks that are `leaving`, or do not push any more, give what they have not sent to the
        first of `replicas` that goes on. All of these call it together; nothing changes where none gives or none takes.
        """
        gives, unsent = leaving or self.group.rank < 0, self.residual
        told = torch.zeros(2, replicas.size)
        told[:, replicas.rank] = torch.tensor([float(gives and unsent is not None), float(not gives)])
        replicas.all_reduce(told).wait()
        takers = torch.nonzero(told[1]).view(-1).tolist()
        if not told[0].any() or not takers:
            return
        given = unsent.clone() if gives and unsent is not None else self._zeros()
        replicas.all_reduce(given).wait()
        if gives:
            self._residual = None
        elif replicas.rank == takers[0]:
            self.arrival().copy_(given)

    def begin(self, gradient: Tensor) -> None:
        """The next push is of `gradient` `[numel]`, and of what was not sent before."""
        self.rounds += 1
        if not len(self._term):
            self._term = torch.empty_like(gradient, dtype=self._term.dtype)
        self._term.copy_(gradient)
        if self.feedback and self.residual is None:
            self._residual = torch.zeros_like(self._term)
        if self.residual is not None:
            self._term.add_(self.residual)
            self._spent.add(Coding(term=float(two_norm(self._term)) ** 2))

    def encoded(self, span: slice, *, to: int) -> Tensor:
        """The part `span` of the push as bytes, uint8, for the server `to`; it stays as it is until the next push."""
        term, key = self._term[span], self._key(self._rank, to, self.rounds)
        with self._spent.encoding():
            payload = self._codec.encode(term, key=key)
            self._packed[to] = pack(self._codec, payload)
            if self.residual is not None:
                sent = self._codec.decode(payload, len(term), key=key, dtype=term.dtype)
                torch.sub(term, sent, out=self.residual[span])
                self._spent.add(Coding(error=float(two_norm(self.residual[span])) ** 2))
        return self._packed[to]

    def exact(self, span: slice) -> Tensor:
        """The part `span` as it is, for the server that is this rank."""
        if self.residual is not None:
            self.residual[span] = 0
        return self._term[span]

    def nbytes(self, numel: int) -> int:
        """Bytes of the encoding of a span of `numel`."""
        return self._codec.wire_bytes(numel)

    def decoded(self, packed: Tensor, into: Tensor, *, source: int, number: int) -> None:
        """Writes the span that worker `source` encoded for this rank in its push `number` into `into`, `[numel]`."""
        payload = unpack(self._codec, packed, len(into))
        key = self._key(source, self._rank, number)
        with self._spent.decoding():
            into.copy_(
                self._codec.decode(payload, len(into), key=key, dtype=torch.promote_types(into.dtype, torch.float32))
            )

    def _zeros(self) -> Tensor:
        return torch.zeros(max(segment.slice.stop for segment in self.segments), dtype=self._term.dtype)

    def _key(self, worker: int, server: int, number: int) -> int:
        return key_of(self._seed, "push", worker, server, number)
