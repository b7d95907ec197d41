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

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Payload, pack, unpack
from shoal.comm.collective import Collective, Handle
from shoal.maths.counter import key_of


@dataclass
class Spent:
    """Seconds of coding, and squared norms: `term` is what was to be sent, `error` what was not."""

    encode_s: float = 0.0
    decode_s: float = 0.0
    error: float = 0.0
    term: float = 0.0

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Around an encoding, with what follows from it on this rank."""
        begin_s = time.perf_counter()
        yield
        self.encode_s += time.perf_counter() - begin_s

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Around a decoding of what has come."""
        begin_s = time.perf_counter()
        yield
        self.decode_s += time.perf_counter() - begin_s


class CodedSum(Protocol):
    """One sum after the other; each is `send`, `settle` and `wait`."""

    def send(self, term: Tensor, error: Tensor | None, *, key: int) -> None:
        """Starts to send `term` `[numel]`. `key` is that of this sum, the same on all ranks.

        `error`, which may be the same memory, holds after `wait` what was not sent of it.
        """
        ...

    def settle(self) -> None:
        """Starts what follows."""
        ...

    def wait(self) -> Tensor:
        """The sum `[numel]`, the same bits on all ranks."""
        ...


def coded_sum(codec: Codec, group: Collective, numel: int, spent: Spent) -> CodedSum:
    """The way that sends least. `spent` is added to."""
    if group.size == 1:
        return _Alone()
    if codec.linear:
        return _AllReduced(codec, group, spent)
    part = -(-numel // group.size)
    if 2 * codec.wire_bytes(part) < codec.wire_bytes(numel):
        return _TwoShot(codec, group, spent, part=part)
    return _Gathered(codec, group, spent)


class _Alone:
    """One rank: all is sent, and nothing is left."""

    def send(self, term: Tensor, error: Tensor | None, *, key: int) -> None:
        self._sum = term.clone()
        if error is not None:
            error.zero_()

    def settle(self) -> None:
        """Nothing follows."""

    def wait(self) -> Tensor:
        return self._sum


class _AllReduced:
    """Payloads are summed on the way, in as many rounds as the codec asks for."""

    def __init__(self, codec: Codec, group: Collective, spent: Spent) -> None:
        self._codec, self._group, self._spent = codec, group, spent
        self._handles: list[Handle] = []

    def send(self, term: Tensor, error: Tensor | None, *, key: int) -> None:
        self._term, self._error = term, error
        self._sums: tuple[Tensor, Tensor] | None = None
        self._rounds: Generator[Payload, None, tuple[Tensor, Tensor]] = self._codec.summing(term, key=key)
        with self._spent.encoding():
            payload = next(self._rounds)
        self._reduce(payload)

    def settle(self) -> None:
        self._advance()

    def wait(self) -> Tensor:
        while self._sums is None:
            self._advance()
        sent, total = self._sums
        if self._error is not None:
            torch.sub(self._term, sent, out=self._error)
        return total

    def _advance(self) -> None:
        """Waits for a round and starts the next; after the last one there are sums."""
        for handle in self._handles:
            handle.wait()
        try:
            with self._spent.decoding():
                payload = next(self._rounds)
        except StopIteration as end:
            self._sums = end.value
        else:
            self._reduce(payload)

    def _reduce(self, payload: Payload) -> None:
        self._handles = [self._group.all_reduce(part) for part in payload if part.numel()]


class _Gathered:
    """Every payload goes to every rank."""

    def __init__(self, codec: Codec, group: Collective, spent: Spent) -> None:
        self._codec, self._group, self._spent = codec, group, spent

    def send(self, term: Tensor, error: Tensor | None, *, key: int) -> None:
        with self._spent.encoding():
            payload = self._codec.encode(term, key=key_of(key, self._group.rank))
            self._like = term
            if error is not None:
                torch.sub(term, _decoded(self._codec, payload, term), out=error)
            packed = pack(self._codec, payload)
        self._rows = packed.new_empty(self._group.size, packed.numel())
        self._handle = self._group.all_gather(self._rows.view(-1), packed)

    def settle(self) -> None:
        """Nothing follows."""

    def wait(self) -> Tensor:
        self._handle.wait()
        with self._spent.decoding():
            return _sum_of(self._codec, self._rows, self._like)


class _TwoShot:
    """Rank r adds the parts r of all ranks, `part` numbers each, and tells all the sum.

    What its encoding of the sum leaves out becomes a part of this rank's error.
    """

    def __init__(self, codec: Codec, group: Collective, spent: Spent, *, part: int) -> None:
        self._codec, self._group, self._spent, self._part = codec, group, spent, part

    def send(self, term: Tensor, error: Tensor | None, *, key: int) -> None:
        size, self._error, self._numel = self._group.size, error, term.numel()
        self._key = key_of(key, self._group.rank)
        self._like = torch.empty(self._part, dtype=term.dtype, device=term.device)
        with self._spent.encoding():
            filled = torch.nn.functional.pad(term, (0, size * self._part - term.numel())).view(size, self._part)
            payloads = [self._codec.encode(part, key=key_of(self._key, to)) for to, part in enumerate(filled)]
            if error is not None:
                sent = torch.cat([_decoded(self._codec, payload, self._like) for payload in payloads])
                torch.sub(term, sent[: self._numel], out=error)
            mine = torch.stack([pack(self._codec, payload) for payload in payloads])
        self._rows = torch.empty_like(mine)
        self._handle = self._group.all_to_all(self._rows.view(-1), mine.view(-1))

    def settle(self) -> None:
        self._handle.wait()
        with self._spent.decoding():
            summed = _sum_of(self._codec, self._rows, self._like)
        with self._spent.encoding():
            payload = self._codec.encode(summed, key=key_of(self._key, "sum"))
            if self._error is not None:
                mine = self._error[self._part * self._group.rank :][: self._part]
                mine.add_((summed - _decoded(self._codec, payload, summed))[: mine.numel()])
            packed = pack(self._codec, payload)
        self._handle = self._group.all_gather(self._rows.view(-1), packed)

    def wait(self) -> Tensor:
        self._handle.wait()
        with self._spent.decoding():
            parts = [_decoded(self._codec, unpack(self._codec, row, self._part), self._like) for row in self._rows]
            return torch.cat(parts)[: self._numel]


def _decoded(codec: Codec, payload: Payload, like: Tensor) -> Tensor:
    """Of a codec that is not linear, whose decoding needs no key."""
    return codec.decode(payload, like.numel(), dtype=like.dtype)


def _sum_of(codec: Codec, rows: Tensor, like: Tensor) -> Tensor:
    """The sum, in the order of ranks, of the packed payloads `rows` `[ranks, bytes]` of vectors as long as `like`."""
    total = torch.zeros_like(like)
    for row in rows:
        total.add_(_decoded(codec, unpack(codec, row, like.numel()), like))
    return total
