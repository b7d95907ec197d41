"""Parameters as views of one flat buffer, of which this rank updates its piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Allocate, Collective, Handle, ordinary
from shoal.sync.zero.flat_layout import FlatLayout


class FlatParameters:
    """ZeRO-1 and -2: every rank holds all numbers; `piece` is a view of those that it updates."""

    def __init__(self, parameters: Sequence[Parameter], layout: FlatLayout, shard: Collective) -> None:
        self._shard = shard
        self._whole = flattened(parameters, layout, shard.allocate)
        self.piece = self._whole[layout.mine(shard.rank)]
        for number, parameter in enumerate(parameters):
            parameter.data = self._whole[layout.slice(number)].view(parameter.shape)

    def start_gather(self) -> Handle:
        """Begins to bring the pieces of the other ranks, in place."""
        return self._shard.all_gather(self._whole, self.piece)


@torch.no_grad()
def flattened(parameters: Sequence[Parameter], layout: FlatLayout, allocate: Allocate = ordinary) -> Tensor:
    """A buffer that holds the parameters; what belongs to none of them is zero."""
    whole = allocate(layout.numel, dtype=parameters[0].dtype, device=parameters[0].device)
    for number, parameter in enumerate(parameters):
        whole[layout.slice(number)].view(parameter.shape).copy_(parameter)
    return whole
