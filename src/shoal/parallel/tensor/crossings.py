"""How activations get into split layers and out of them, with and without sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shoal.comm.collective import Collective
from shoal.parallel.tensor import operators
from shoal.parallel.tensor.layers import Crossing, Entrance
from shoal.parallel.tensor.region import CONTAINERS, Region


@dataclass(frozen=True)
class Crossings:
    """The operators between the stream and the split layers of one group."""

    group: Collective
    sequence_parallel: bool

    @property
    def enter(self) -> Crossing:
        """From the stream to all of the sequence, on the way to a part of the features."""
        return partial(operators.enter_sequence if self.sequence_parallel else operators.enter, group=self.group)

    @property
    def leave(self) -> Crossing:
        """From one term of a sum to the stream."""
        return partial(operators.leave_sequence if self.sequence_parallel else operators.leave, group=self.group)

    def entrances(self, region: Region) -> dict[str, Crossing]:
        """For each column layer of `region`, what it does to its input."""
        if self.gathers_at(region):
            return dict.fromkeys(region.columns, _inside)
        if isinstance(region.module, CONTAINERS):
            return dict.fromkeys(region.columns, self.enter)
        return dict.fromkeys(region.columns, Entrance(self.enter, len(region.columns)))

    def gathers_at(self, region: Region) -> bool:
        """Does the whole module get the gathered sequence, so that its code sees one length throughout?"""
        return self.sequence_parallel and region.closed


def _inside(x: Tensor) -> Tensor:
    return x
