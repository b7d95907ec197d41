"""`Coded`: the sum of a buffer over a group, of which less is sent: every rank encodes its part with a codec.

    c_r = g_r + e_r                      this rank's term, and what it has not sent so far
    result = sum over r of decode(encode(c_r))
    e_r = c_r - decode(encode(c_r))      error feedback

(Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847,
algorithm 2.) How the sum is made is `coded_sum`'s. Nothing is lost on any way: over all ranks,

    result + sum of e_r (new) = sum of g_r + sum of e_r (old)

up to the rounding of sums. A new residual counts when its step has led to an update (`commit`); otherwise the step is
forgotten. What is not finite on one rank makes the result not finite on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Place
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded_sum import Spent, coded_sum
from shoal.comm.exchanges.exchange import Segment
from shoal.maths.counter import key_of
from shoal.maths.norm import two_norm


class Coded:
    """The sum of `buffer` `[numel]` over `group`, in place. `segments` say what lies in it; what lies outside of them
    is zero, and stays so.

    `feedback`: keep what was not sent, in float32 at least. `key` is that of the codec's random numbers, the same on
    all ranks of the group. `spent` is added to. `rounds` counts sums, and random numbers follow from it.
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
        spent: Spent | None = None,
    ) -> None:
        self.group, self.result, self.segments, self.rounds = group, buffer, tuple(segments), 0
        self._key, self._spent = key, spent or Spent()
        places = [Place(*segment) for segment in segments]
        self._codec = codec.bound(places, key=key, rank=group.rank, ranks=group.size)
        self._sum = coded_sum(self._codec, group, buffer.numel(), self._spent)
        self._dtype = torch.promote_types(buffer.dtype, torch.float32)
        self._gaps = _gaps(segments, buffer)
        self._residual = torch.zeros_like(buffer, dtype=self._dtype) if feedback else None
        self._next = None if self._residual is None else torch.empty_like(self._residual)
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
        term, residual = buffer.to(self._dtype), self.residual
        if residual is not None:
            term = torch.add(term, residual, out=self._next)
            self._spent.term += float(two_norm(term)) ** 2
        self._sum.send(term, self._next, key=key_of(self._key, self.rounds))
        self._sent = True

    def land(self) -> None:
        """The buffer was read when it was sent."""

    def settle(self) -> None:
        self._sum.settle()

    def wait(self) -> None:
        if not self._sent:
            return
        self.result.copy_(self._sum.wait())
        self.result[self._gaps] = 0
        if self._next is not None:
            self._next[self._gaps] = 0
            self._spent.error += float(two_norm(self._next)) ** 2

    def commit(self) -> None:
        if self._sent:
            self._residual, self._next, self._sent = self._next, self._residual, False


class CodedExchanges:
    """The `NewExchange` of a run with a codec; `made` are those that it has made. `new` makes one."""

    def __init__(self, codec: Codec, *, feedback: bool, seed: int, new: Callable[..., Coded] = Coded) -> None:
        self._new = new
        self._codec, self._feedback, self._seed = codec, feedback, seed
        self._spent, self.by_microbatch = Spent(), False
        self.made: list[Coded] = []

    def __call__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment]) -> Coded:
        key = key_of(self._seed, "codec", *(segment.name for segment in segments))
        exchange = self._new(self._codec, group, buffer, segments, feedback=self._feedback, key=key, spent=self._spent)
        self.made.append(exchange)
        return exchange

    def take_figures(self) -> dict[str, float]:
        """Measurements since the last call: seconds, and with error feedback how much of what this rank had to send it
        has kept back, |e| / |g + e|.
        """
        spent = self._spent
        figures = {"codec/encode_s": spent.encode_s, "codec/decode_s": spent.decode_s}
        if spent.term > 0:
            figures["codec/error"] = math.sqrt(spent.error / spent.term)
        spent.encode_s = spent.decode_s = spent.error = spent.term = 0.0
        return figures


def _gaps(segments: Sequence[Segment], buffer: Tensor) -> Tensor:
    """The places of `buffer` that belong to no segment, int64."""
    outside = torch.ones(buffer.numel(), dtype=torch.bool)
    for segment in segments:
        outside[segment.slice] = False
    return torch.nonzero(outside).view(-1).to(buffer.device)
