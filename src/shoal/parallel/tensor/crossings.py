"""How activations get into split layers and out of them: whole or in slices, along one axis or in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shoal.comm.collective import Collective
from shoal.parallel.tensor import operators
from shoal.parallel.tensor.blocks import enter_block, enter_block_sequence, leave_block, leave_block_sequence
from shoal.parallel.tensor.layers import Crossing, Entrance, change_input, change_output
from shoal.parallel.tensor.region import CONTAINERS, Region
from shoal.parallel.tensor.summa import Grid


@dataclass(frozen=True)
class Crossings:
    """The operators between the stream and the split layers of one group."""

    group: Collective
    sequence_parallel: bool
    grid: Grid | None = None

    @property
    def enter(self) -> Crossing:
        """From the stream to all of the sequence, on the way to a part of the features."""
        return partial(operators.enter_sequence if self.sequence_parallel else operators.enter, group=self.group)

    @property
    def leave(self) -> Crossing:
        """From one term of a sum to the stream."""
        return partial(operators.leave_sequence if self.sequence_parallel else operators.leave, group=self.group)

    def entrances(self, region: Region) -> dict[str, Crossing]:
        """For each layer of `region` that takes the stream, what it does to its input."""
        if self.gathers_at(region):
            return dict.fromkeys(region.first, _inside)
        if isinstance(region.module, CONTAINERS):
            return dict.fromkeys(region.first, self.enter)
        return dict.fromkeys(region.first, Entrance(self.enter, len(region.first)))

    def gathers_at(self, region: Region) -> bool:
        """Does the whole module get the gathered sequence, so that its code sees one length throughout?"""
        return self.sequence_parallel and region.closed

    def grid_of(self, region: Region) -> Grid | None:
        """The grid on which the layers of `region` lie in blocks, where they do."""
        return self.grid if region.closed and region.takes_blocks else None

    def install(self, region: Region) -> bool:
        """Lets the whole module get what it needs, by hooks; is it now one that sees more than the stream outside?"""
        grid = self.grid_of(region)
        if grid is not None:
            there, back = _BLOCKS_OF_SLICES if self.sequence_parallel else _BLOCKS
            change_input(region.module, partial(there, grid=grid))
            change_output(region.module, partial(back, grid=grid))
        elif self.gathers_at(region):
            change_input(region.module, self.enter)
        return grid is not None or self.gathers_at(region)


_BLOCKS = (enter_block, leave_block)
_BLOCKS_OF_SLICES = (enter_block_sequence, leave_block_sequence)


def _inside(x: Tensor) -> Tensor:
    return x
