"""Synchronous data parallelism: all replicas sum their gradients in every step, and so make the same update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.comm.exchanges.exchange import AllReduce, NewExchange
from shoal.comm.mesh import Mesh
from shoal.sync.config import AllReduceConfig
from shoal.topology.holding import Holding, Ranks


class AllReduceSync:
    """`Sync` of kind "allreduce": sums inside and across replicas are one all-reduce."""

    exchange: NewExchange = AllReduce
    sections: Sequence[Any] = ()

    def __init__(self, config: AllReduceConfig, mesh: Mesh) -> None:
        self.lockstep = mesh.world

    def gradient_ranks(self, holding: Holding) -> Ranks:
        return holding.sums

    def after_update(self, step: int) -> None:
        """Equal gradients have met equal states: the replicas are equal."""

    def settle(self) -> None:
        """Nothing is under way between two steps."""
