"""Synchronous data parallelism: all replicas sum their gradients in every step, and so make the same update.

In canonical order they sum the gradients of logical shards of the batch, as many whatever the number of replicas, in
one fixed tree (`comm.exchanges.canonical`); each shard is a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.comm.exchanges.canonical import Canonical
from shoal.comm.exchanges.exchange import AllReduce, NewExchange
from shoal.comm.mesh import Mesh
from shoal.state.section import Section
from shoal.sync.config import AllReduceConfig
from shoal.sync.strategy import Agreed, OwnOptimizer, Replica, Taken
from shoal.topology.axes import DENSE, Axis
from shoal.topology.holding import Holding, Ranks


class AllReduceSync:
    """`Sync` of kind "allreduce": sums inside and across replicas are one all-reduce."""

    lockstep_axes: tuple[Axis, ...] = DENSE
    keeps_replicas_equal = True

    def __init__(self, config: AllReduceConfig, mesh: Mesh) -> None:
        """Nothing to open: the groups of the gradients are all it needs."""
        self.exchange: NewExchange = Canonical if config.order == "canonical" else AllReduce

    def gradient_ranks(self, holding: Holding) -> Ranks:
        return holding.sums

    def agreement(self, replica: Replica) -> AlwaysEqual:
        return AlwaysEqual()


class AlwaysEqual(OwnOptimizer):
    """`Agreement` of replicas that make the same update: equal gradients have met equal states."""

    equal = True
    sections: Sequence[Section] = ()

    def before_step(self, weight: float = 1.0) -> None:
        """Nothing to prepare."""

    def after_update(self, step: int, taken: Taken) -> Agreed:
        return Agreed(taken.stop, taken.tokens)
