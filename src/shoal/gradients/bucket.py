"""`Bucket`: where the gradients of some parameters lie in one flat buffer. What ranks do with it is its exchange's.

The buffer of a bucket is either kept from step to step, or lent: it is made when the first gradient comes, and given
back when the exchange has taken it in (ZeRO-2). Gradients of 16 bits are summed in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.exchanges.exchange import Exchange
from shoal.gradients.flat import FlatLayout
from shoal.maths.norm import two_norm

IN_FLIGHT = 2
"""Lent buffers on their way at the same time; one more is being filled."""


@dataclass
class Flight:
    """The lent buffers on their way, over the whole model: beyond `limit`, the oldest is waited for."""

    limit: int = IN_FLIGHT
    _flying: deque[Bucket] = field(default_factory=deque)

    def take_off(self, bucket: Bucket) -> None:
        """`bucket` has just been sent."""
        self._flying.append(bucket)
        while len(self._flying) > self.limit:
            self._flying.popleft().land()

    def end(self) -> None:
        """All that are on their way arrive."""
        while self._flying:
            self._flying.popleft().land()


class Bucket:
    """The gradients of `parameters` (by index), laid out as `layout`; this rank's piece is that of `rank`.

    `buffer` is kept; None: it is lent, and `flight` counts those on their way. `counted` are the parameters whose
    numbers in the result this rank counts in the norm. `norm_share`: if all ranks of a group count the same result,
    the part of it whose norm this rank computes. `missing` counts gradients that are not final yet; the reducer writes
    it. `kept` is told the bytes of a result that a lent buffer was taken into.
    """

    def __init__(
        self,
        parameters: Mapping[int, Parameter],
        layout: FlatLayout,
        exchange: Exchange,
        *,
        rank: int = 0,
        buffer: Tensor | None = None,
        counted: Collection[int] = (),
        norm_share: slice | None = None,
        flight: Flight | None = None,
        kept: Callable[[int], None] | None = None,
    ) -> None:
        first = next(iter(parameters.values()))
        self.parameters, self.layout, self.exchange, self.counted = parameters, layout, exchange, counted
        self.dtype, self.device = exchange.result.dtype, first.device
        self.keeps, self.missing = buffer is not None and self.dtype == first.dtype, 0
        self._kept, self._buffer, self._norm_share = buffer is not None, buffer, norm_share
        self._flight, self._flying = flight or Flight(), False
        self._told = kept
        self._views = {} if buffer is None else self._views_of(buffer)
        self.pieces = self._pieces(rank)

    @property
    def indices(self) -> Collection[int]:
        """The parameters whose gradients are in it."""
        return self.parameters.keys()

    def slice(self, index: int) -> Tensor:
        """Where this rank's gradient of parameter `index` belongs, in the shape of the parameter."""
        if not self._kept:
            self.land()  # of the microbatch before
            if self._buffer is None:
                self._lend()
        return self._views[index]

    def start(self) -> None:
        """Forgets the step before."""
        self.exchange.start()

    def send(self) -> None:
        """Every slice is filled: starts the exchange. Does not block."""
        buffer = self._lend() if self._buffer is None else self._buffer
        self.exchange.send(buffer)
        if not self._kept:
            self._flying = True
            self._flight.take_off(self)

    def land(self) -> None:
        """Returns when a lent buffer has been taken in, and gives it back."""
        if self._flying:
            self.exchange.land()
            if self._told is not None:
                self._told(self.exchange.result.nbytes)
            self._buffer, self._views, self._flying = None, {}, False

    def settle(self) -> None:
        """No more is sent in this step: starts what follows. All buckets settle before the first one waits."""
        self._flight.end()
        self.exchange.settle()

    def wait(self) -> None:
        """Returns when the result is agreed."""
        self.exchange.wait()

    def commit(self) -> None:
        """The update was made from the result."""
        self.exchange.commit()

    def norm(self) -> Tensor:
        """The 2-norm of those numbers of the result that this rank counts: a float64 scalar."""
        result = self.exchange.result
        if self._norm_share is not None:
            return two_norm(result[self._norm_share])
        counted = [index for index in self.counted if index in self.pieces]
        if len(counted) == len(self.pieces):  # in one pass: what belongs to no parameter is zero
            return two_norm(result)
        if not counted:
            return two_norm(result[:0])
        return two_norm(torch.stack([two_norm(self.pieces[index]) for index in counted]))

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the result."""
        self.exchange.result.mul_(factor)

    def _lend(self) -> Tensor:
        """A buffer for this rank's gradients. What belongs to no parameter is zero, as the norm counts it."""
        self._buffer = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        for gap in self.layout.gaps:
            self._buffer[gap].zero_()
        self._views = self._views_of(self._buffer)
        return self._buffer

    def _views_of(self, buffer: Tensor) -> dict[int, Tensor]:
        return {
            index: buffer[self.layout.slice(number)].view(parameter.shape)
            for number, (index, parameter) in enumerate(self.parameters.items())
        }

    def _pieces(self, rank: int) -> dict[int, Tensor]:
        """What of each parameter's agreed gradient lies in the result; whole ones in the shape of the parameter."""
        found: dict[int, Tensor] = {}
        for number, (index, parameter) in enumerate(self.parameters.items()):
            run = self.layout.run(number, rank)
            if run is not None:
                piece = self.exchange.result[run.at : run.at + run.numel]
                found[index] = piece.view(parameter.shape) if run.numel == parameter.numel() else piece
        return found
