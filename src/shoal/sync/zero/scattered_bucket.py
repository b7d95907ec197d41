"""A bucket whose gradients are summed by reduce-scatter: each rank of `shard` keeps its piece of the sum.

    piece_r = sum over `others` of  reduce_scatter over `shard` (whole)[r]

`others` are the ranks beyond `shard` that add to the same gradient. ZeRO-1 keeps the whole buffer, sums in place and
does so once a step. ZeRO-2 gives the buffer back as soon as its sum is on its way, and adds up the pieces of the
microbatches. Gradients of 16 bits are added in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.buckets.summed import counted_norm
from shoal.comm.collective import Collective, Handle
from shoal.sync.zero.flat_layout import FlatLayout

IN_FLIGHT = 2


@dataclass
class Flight:
    """The buckets on their way, over all of a model: the oldest is waited for when there would be more than `limit`."""

    limit: int = IN_FLIGHT
    _flying: deque[ScatteredBucket] = field(default_factory=deque)

    def take_off(self, bucket: ScatteredBucket) -> None:
        """`bucket` has just been sent."""
        self._flying.append(bucket)
        while len(self._flying) > self.limit:
            self._flying.popleft().land()

    def end(self) -> None:
        """All that are on their way arrive."""
        while self._flying:
            self._flying.popleft().land()


class ScatteredBucket:
    """The gradients of `parameters` (by index), laid out as `layout`. `counted`: those whose pieces are counted here.

    `stays`: the buffer of the whole gradients is kept from step to step.
    """

    def __init__(
        self,
        parameters: dict[int, Parameter],
        layout: FlatLayout,
        *,
        shard: Collective,
        others: Collective,
        counted: Collection[int],
        stays: bool,
        flight: Flight,
    ) -> None:
        first = next(iter(parameters.values()))
        self.dtype = torch.float32 if first.dtype.itemsize == 2 else first.dtype
        self.device, self.layout, self.shard, self.others, self.counted = first.device, layout, shard, others, counted
        self.stays, self.keeps, self.missing = stays, stays and self.dtype == first.dtype, 0
        self._flight, self._parameters = flight, parameters
        self._whole: Tensor | None = None
        self._views: dict[int, Tensor] = {}
        self._handle: Handle | None = None
        self._late: Tensor | None = None
        self._sent = False
        mine = layout.mine(shard.rank)
        self.piece = self._buffer()[mine] if stays else torch.zeros(layout.piece, dtype=self.dtype, device=self.device)
        self.runs: dict[int, Tensor] = {}
        for number, index in enumerate(parameters):
            run = layout.run(number, shard.rank)
            if run is not None:
                self.runs[index] = self.piece[run.at : run.at + run.numel]

    @property
    def slices(self) -> Collection[int]:
        return self._parameters

    def slice(self, index: int) -> Tensor:
        if not self.stays:
            self.land()  # of the microbatch before
        if self._whole is None:
            self._buffer()
        return self._views[index]

    def start(self) -> None:
        self._sent, self._handle = False, None

    def send(self) -> None:
        """Starts the sum over `shard`; into the piece, or beside it where the piece holds earlier microbatches."""
        whole = self._buffer() if self._whole is None else self._whole
        self._late = torch.empty_like(self.piece) if self._sent else None
        self._handle = self.shard.reduce_scatter(self.piece if self._late is None else self._late, whole)
        self._sent = True
        if not self.stays:
            self._flight.take_off(self)

    def land(self) -> None:
        """The sum has arrived: the whole gradients are given back."""
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        if self._late is not None:
            self.piece.add_(self._late)
            self._late = None
        if not self.stays:
            self._whole = None
            self._views = {}

    def settle(self) -> None:
        self._flight.end()
        self.land()
        self._handle = self.others.all_reduce(self.piece) if self.others.size > 1 else None

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()

    def norm(self) -> Tensor:
        counted = [index for index in self.counted if index in self.runs]
        return counted_norm(self.piece, self.runs, counted)

    def _buffer(self) -> Tensor:
        """A buffer for the whole gradients. What belongs to no parameter is zero, as the norm counts it."""
        if self.stays:
            whole = self.shard.allocate(self.layout.numel, dtype=self.dtype, device=self.device)
        else:
            whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
            for gap in self.layout.gaps:
                whole[gap].zero_()
        self._views = {
            index: whole[self.layout.slice(number)].view(parameter.shape)
            for number, (index, parameter) in enumerate(self._parameters.items())
        }
        self._whole = whole
        return whole
