"""`Coded`: the sum of a buffer over a group, of which less is sent: every rank encodes its part with a codec.

    c_r = g_r + e_r                      this rank's term, and what it has not sent so far
    result = sum over r of decode(encode(c_r))
    e_r = c_r - decode(encode(c_r))      error feedback

(Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847.) How the
sum is made follows from the codec and from the bytes that each of n ranks sends of a buffer of m numbers:

    way          for                                                     bytes a rank sends
    all-reduce   linear codecs: payloads are summed on the way           those of all-reduces of w(m) in all
    gather       others: all payloads go to all ranks, which add them    (n - 1) w(m)
    two-shot     others: rank r gets part r of all, adds, encodes the    2 (n - 1) w(m / n)
                 sum once more, and sends that to all

w are a codec's `wire_bytes`. Of the last two the one that sends less is taken, gather where they send the same. Every
rank decodes the same bytes in the same order, so all have the same bits. What the second encoding of a two-shot leaves
out is added to the residual of the rank that made it: over all ranks,

    result + sum of e_r (new) = sum of g_r + sum of e_r (old)

A new residual counts when its step has led to an update (`commit`); the step is forgotten otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Payload, Place, pack, unpack
from shoal.comm.collective import Collective, Handle
from shoal.comm.exchanges.exchange import Segment
from shoal.maths.counter import key_of


class Coded:
    """The sum of `buffer` `[numel]` over `group`, in place. `segments` say what lies in it; what lies outside of them
    is zero, and stays so.

    `feedback`: keep what was not sent, in float32 at least. `key` is that of the codec's random numbers, the same on
    all ranks of the group.
    """

    def __init__(
        self,
        codec: Codec,
        group: Collective,
        buffer: Tensor,
        segments: Sequence[Segment],
        *,
        feedback: bool,
        key: int,
    ) -> None:
        self.group, self.result, self.segments, self.rounds = group, buffer, tuple(segments), 0
        self._codec = codec.bound([Place(*segment) for segment in segments], key=key)
        self._key, self._way = key, _way_of(self._codec, group, buffer.numel())
        self._dtype = torch.promote_types(buffer.dtype, torch.float32)
        self._gaps = _gaps(segments, buffer)
        self._residual = torch.zeros_like(buffer, dtype=self._dtype) if feedback else None
        self._next = torch.empty_like(self._residual) if self._residual is not None else None
        self._arrivals: list[Tensor] = []
        self._sent = False

    @property
    def residual(self) -> Tensor | None:
        """What this rank has not sent so far, `[numel]`; None without error feedback."""
        while self._arrivals and self._residual is not None:
            self._residual.add_(self._arrivals.pop())
        return self._residual

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What the codec has learned, the same on all ranks of the group; to be saved."""
        return self._codec.state

    def arrival(self) -> Tensor:
        """A tensor `[numel]` of zeros; what is written into it is added to the residual before that is next used."""
        self._arrivals.append(torch.zeros_like(self.result, dtype=self._dtype))
        return self._arrivals[-1]

    def start(self) -> None:
        self._sent = False

    def send(self, buffer: Tensor) -> None:
        self.rounds += 1
        residual = self.residual
        if residual is None or self._next is None:
            self._way.send(buffer.to(self._dtype), None, self._key, self.rounds)
        else:
            corrected = torch.add(buffer, residual, out=self._next)
            self._way.send(corrected, self._next, self._key, self.rounds)
        self._sent = True

    def land(self) -> None:
        """The buffer was read when it was sent."""

    def settle(self) -> None:
        self._way.settle()

    def wait(self) -> None:
        if not self._sent:
            return
        self.result.copy_(self._way.wait())
        self.result[self._gaps] = 0
        if self._next is not None:
            self._next[self._gaps] = 0

    def commit(self) -> None:
        if self._sent:
            self._residual, self._next, self._sent = self._next, self._residual, False


class CodedExchanges:
    """The `NewExchange` of a run with a codec; `made` are those that it has made."""

    def __init__(self, codec: Codec, *, feedback: bool, seed: int) -> None:
        self._codec, self._feedback, self._seed = codec, feedback, seed
        self.made: list[Coded] = []

    def __call__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment]) -> Coded:
        key = key_of(self._seed, "codec", *(segment.name for segment in segments))
        self.made.append(Coded(self._codec, group, buffer, segments, feedback=self._feedback, key=key))
        return self.made[-1]


class _Way(Protocol):
    """How a sum is made. One step is `send`, `settle` and `wait`."""

    def send(self, term: Tensor, error: Tensor | None, key: int, round: int) -> None:
        """Starts to send `term` `[numel]`. `error`, which may be the same memory, becomes what is not sent of it."""
        ...

    def settle(self) -> None:
        """Starts what follows."""
        ...

    def wait(self) -> Tensor:
        """The sum `[numel]`, the same bits on all ranks."""
        ...


def _way_of(codec: Codec, group: Collective, numel: int) -> _Way:
    if group.size == 1:
        return _Alone()
    if codec.linear:
        return _AllReduced(codec, group)
    part = -(-numel // group.size)
    if 2 * codec.wire_bytes(part) < codec.wire_bytes(numel):
        return _TwoShot(codec, group, part)
    return _Gathered(codec, group)


class _Alone:
    """One rank: all is sent, and nothing is left."""

    def send(self, term: Tensor, error: Tensor | None, key: int, round: int) -> None:
        self._sum = term.clone()
        if error is not None:
            error.zero_()

    def settle(self) -> None:
        """Nothing follows."""

    def wait(self) -> Tensor:
        return self._sum


class _AllReduced:
    """Payloads are summed on the way, in as many rounds as the codec asks for."""

    def __init__(self, codec: Codec, group: Collective) -> None:
        self._codec, self._group = codec, group
        self._handles: list[Handle] = []

    def send(self, term: Tensor, error: Tensor | None, key: int, round: int) -> None:
        self._term, self._error, self._sums = term, error, None
        self._rounds = self._codec.summing(term, key=key_of(key, round))
        self._advance()

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
        self._handles = []
        try:
            self._handles = [self._group.all_reduce(part) for part in next(self._rounds) if part.numel()]
        except StopIteration as end:
            self._sums = end.value


class _Gathered:
    """Every payload goes to every rank."""

    def __init__(self, codec: Codec, group: Collective) -> None:
        self._codec, self._group = codec, group

    def send(self, term: Tensor, error: Tensor | None, key: int, round: int) -> None:
        payload = self._codec.encode(term, key=key_of(key, round, self._group.rank))
        self._like = term
        if error is not None:
            torch.sub(term, _decoded(self._codec, payload, term, 0), out=error)
        packed = pack(self._codec, payload)
        self._rows = packed.new_empty(self._group.size, packed.numel())
        self._handle = self._group.all_gather(self._rows.view(-1), packed)

    def settle(self) -> None:
        """Nothing follows."""

    def wait(self) -> Tensor:
        self._handle.wait()
        return _sum_of(self._codec, self._rows, self._like)


class _TwoShot:
    """Rank r adds the parts r of all ranks, `part` numbers each, and tells all the sum."""

    def __init__(self, codec: Codec, group: Collective, part: int) -> None:
        self._codec, self._group, self._part = codec, group, part
        self._row_bytes = codec.wire_bytes(part)

    def send(self, term: Tensor, error: Tensor | None, key: int, round: int) -> None:
        size, rank = self._group.size, self._group.rank
        self._numel, self._error, self._key = term.numel(), error, key_of(key, round, rank)
        self._like = torch.empty(self._part, dtype=term.dtype, device=term.device)
        filled = torch.nn.functional.pad(term, (0, size * self._part - term.numel())).view(size, self._part)
        payloads = [self._codec.encode(part, key=key_of(self._key, number)) for number, part in enumerate(filled)]
        if error is not None:
            sent = torch.cat([_decoded(self._codec, payload, self._like, 0) for payload in payloads])
            torch.sub(term, sent[: self._numel], out=error)
        mine = torch.stack([pack(self._codec, payload) for payload in payloads])
        self._rows = torch.empty_like(mine)
        self._handle = self._group.all_to_all(self._rows.view(-1), mine.view(-1))

    def settle(self) -> None:
        self._handle.wait()
        summed = _sum_of(self._codec, self._rows, self._like)
        payload = self._codec.encode(summed, key=key_of(self._key, "sum"))
        if self._error is not None:
            mine = self._error[self._part * self._group.rank :][: self._part]
            mine.add_((summed - _decoded(self._codec, payload, summed, 0))[: mine.numel()])
        self._handle = self._group.all_gather(self._rows.view(-1), pack(self._codec, payload))

    def wait(self) -> Tensor:
        self._handle.wait()
        parts = [_decoded(self._codec, unpack(self._codec, row, self._part), self._like, 0) for row in self._rows]
        return torch.cat(parts)[: self._numel]


def _decoded(codec: Codec, payload: Payload, like: Tensor, key: int) -> Tensor:
    return codec.decode(payload, like.numel(), key=key, dtype=like.dtype)


def _sum_of(codec: Codec, rows: Tensor, like: Tensor) -> Tensor:
    """The sum, in the order of ranks, of the packed payloads `rows` `[ranks, bytes]` of vectors as long as `like`."""
    total = torch.zeros_like(like)
    for row in rows:
        total.add_(_decoded(codec, unpack(codec, row, like.numel()), like, 0))
    return total


def _gaps(segments: Sequence[Segment], buffer: Tensor) -> Tensor:
    """The places of `buffer` that belong to no segment, int64."""
    outside = torch.ones(buffer.numel(), dtype=torch.bool)
    for segment in segments:
        outside[segment.slice] = False
    return torch.nonzero(outside).view(-1).to(buffer.device)
