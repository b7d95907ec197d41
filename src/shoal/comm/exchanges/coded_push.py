"""`CodedPushes`: what one worker sends to parameter servers, coded. Each server gets its span of the gradient.

    c = g + e                        this worker's gradient, and what it has not sent so far
    server s decodes encode(c[s])
    e = c - decode(encode(c))        error feedback (arXiv:1901.09847, algorithm 2), span by span

Nobody sums on the way, so a codec must stand for one vector alone. A residual counts as soon as its push has left: a
server that drops a late contribution drops it as it would drop the gradient itself. The random numbers of a push follow
from the run's seed, the worker, the server and the number of the push, which goes along with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.codec.codec import Codec, pack, unpack
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded_sum import Coding, Spent
from shoal.comm.exchanges.exchange import Segment
from shoal.maths.counter import key_of
from shoal.maths.norm import two_norm


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
