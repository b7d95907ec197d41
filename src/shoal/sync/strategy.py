"""`Sync`: how replicas agree. What ranks of one replica do among themselves is `gradients`'.

A strategy answers four questions:

    which gradients are summed in every step    `gradient_ranks`, by `exchange`
    who takes every step together               `lockstep`: these ranks count samples, vote and stop together
    what follows an update                      `after_update`
    what a checkpoint has to hold               `sections`

Under all-reduce the answers are: those of all replicas, all ranks, nothing, nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import NewExchange
from shoal.topology.holding import Holding, Ranks


class Sync(Protocol):
    """One strategy, for one model, in one generation of the membership."""

    @property
    def lockstep(self) -> Collective:
        """The ranks that take every step together: all ranks, or those of one replica."""
        ...

    @property
    def exchange(self) -> NewExchange:
        """What the ranks that sum a gradient do with its buckets."""
        ...

    @property
    def sections(self) -> Sequence[Any]:
        """What a checkpoint holds of the strategy (`engine.state.Section`)."""
        ...

    def gradient_ranks(self, holding: Holding) -> Ranks:
        """The ranks over which the gradient of a part is summed in every step."""
        ...

    def after_update(self, step: int) -> None:
        """After the optimizer's step `step`, on every rank of `lockstep` alike."""
        ...

    def settle(self) -> None:
        """Before an evaluation, a save and the end: returns when nothing is under way between replicas."""
        ...
