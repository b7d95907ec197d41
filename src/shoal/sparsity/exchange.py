"""An all-reduce of what masks and freezing leave of a gradient: a bucket's kept numbers, one after the other.

All ranks have the same masks, and so agree without a word on which numbers are sent: bytes fall with the density, and
no index travels. The sum of what is masked is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce, Segment
from shoal.sparsity.masks import Masks
from shoal.topology.holding import Holding


@dataclass(frozen=True)
class PackedBy:
    """Makes exchanges of the numbers that `masks` keep; `holdings` are those of this rank's masked parameters."""

    masks: Masks
    holdings: Mapping[str, Holding]
    by_microbatch = False

    def __call__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment] = (), /) -> MaskedAllReduce:
        return MaskedAllReduce(group, buffer, segments, masks=self.masks, holdings=self.holdings)


class MaskedAllReduce(AllReduce):
    """The sum over `group` of the numbers that are kept, in place."""

    def __init__(
        self,
        group: Collective,
        buffer: Tensor,
        segments: Sequence[Segment],
        *,
        masks: Masks,
        holdings: Mapping[str, Holding],
    ) -> None:
        super().__init__(group, buffer, segments)
        self._segments, self._masks, self._holdings = segments, masks, holdings
        self._version, self._kept = (-1, False), torch.zeros(0, dtype=torch.int64)
        self._sent: Tensor | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of what a rank has to say."""
        kept = self._indices()
        return self.result.nbytes if kept is None else kept.numel() * self.result.element_size()

    def send(self, buffer: Tensor) -> None:
        kept = self._indices() if self.group.size > 1 else None
        self._sent = None if kept is None else buffer[kept]
        super().send(buffer if self._sent is None else self._sent)

    def wait(self) -> None:
        super().wait()
        if self._sent is not None:
            self.result.zero_()
            self.result[self._kept] = self._sent
            self._sent = None

    def _indices(self) -> Tensor | None:
        """Places of the buffer that are kept; None where all are sent."""
        if not self._masks.frozen and (self._masks.all_sent or not self._masks.bits):
            return None
        version = (self._masks.version, self._masks.all_sent)
        if self._version != version:
            self._version, self._kept = version, self._found()
        return self._kept

    def _found(self) -> Tensor:
        kept = torch.ones(self.result.numel(), dtype=torch.bool, device=self.result.device)
        for segment in self._segments:
            holding = self._holdings.get(segment.name)
            if segment.name in self._masks.frozen:
                kept[segment.slice] = False
                continue
            if holding is None or self._masks.all_sent:
                continue
            mask = self._masks.held(segment.name, holding.global_shape, holding.boxes)
            if mask is not None:
                kept[segment.slice] = mask[segment.skipped : segment.skipped + segment.numel]
        return kept.nonzero().flatten()
