"""How replicas agree. What ranks of one replica do among themselves is `gradients`'.

A strategy has two sides. `Sync` answers, before anything runs,

    who takes every step together               `lockstep_axes`: these ranks count samples, vote and stop together
    which gradients are summed in every step    `gradient_ranks`, by `exchange`
    whether replicas differ between agreements  `keeps_replicas_equal`

and `Agreement` is what runs: what follows an update, and when replicas are equal. An evaluation, a save and the end
wait until they are. Under all-reduce the ranks of all replicas take every step together, and agreement costs nothing
more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.comm.exchanges.coded_sum import CodedPushes
from shoal.comm.exchanges.exchange import AllReduce, Canonical, NewExchange, Segment
from shoal.comm.mesh import Mesh
from shoal.config.check import implementation_of
from shoal.models.roles import EmbeddingTable
from shoal.state import Owned, Section
from shoal.sync.config import AllReduceConfig, SyncConfig
from shoal.sync.event_order import Rounds
from shoal.topology.holding import Holding, Ranks
from shoal.topology.layout import DENSE, INSIDE_REPLICA, Axis

NewPushes = Callable[[int, Sequence[int], Sequence[Segment], torch.dtype], CodedPushes]
"""From this rank, those that push, what lies where in a gradient, and its dtype, to what codes its pushes."""


@dataclass(frozen=True)
class Replica:
    """What a rank updates, as strategies see it. `owned` are the tensors that its optimizer steps; after they have been
    written, `gather` makes the model compute with them. `buffers` are the model's persistent buffers of floating point,
    `counts` those of other dtypes, such as how many batches there were.
    `steps` is the length of the run. `whole`: its optimizer works on whole matrices. `exchange` sums what replicas send
    each other: as it is, or with the run's codec. `pushes` codes what it sends to servers; None: it is sent as it is.
    `rounds` records the order of events, or repeats a recorded one.
    `tables` are the model's embedding tables that are trained, by the names of their weights.
    """

    owned: Sequence[Owned]
    gather: Callable[[], None]
    buffers: Sequence[Tensor]
    counts: Sequence[Tensor]
    steps: int
    whole: bool = False
    exchange: NewExchange = AllReduce
    rounds: Rounds | None = None
    tables: Mapping[str, EmbeddingTable] = field(default_factory=dict)
    pushes: NewPushes | None = None


class Taken(NamedTuple):
    """What the ranks in lock-step did in a step: were they told to stop, the tokens they used, their mean loss, the
    learning rate (None: the optimizer's groups have rates of their own), and what their samples weigh.
    """

    stop: bool
    tokens: int
    loss: float
    lr: float | None
    weight: float = 1.0


Carried = Literal["nothing", "agreed", "newest"]
"""What is left of the state that servers hold when a rank that only works is lost: nothing, that of the last agreement,
or the newest.
"""


class Agreed(NamedTuple):
    """What all replicas know after an agreement: was any told to stop, and the tokens used since the last one."""

    stop: bool
    tokens: int


class Agreement(Protocol):
    """The running side of a strategy, on one rank."""

    @property
    def equal(self) -> bool:
        """Whether all replicas show the same parameters now: those that an evaluation and a save see."""
        ...

    @property
    def sections(self) -> Sequence[Section]:
        """What a checkpoint holds of it."""
        ...

    @property
    def served(self) -> Sequence[Owned] | None:
        """The pieces that this rank's optimizer updates for all replicas; None: it updates its replica's own."""
        ...

    @property
    def carried(self) -> Carried:
        """What survivors of a loss go on with, where this rank's optimizer updates pieces for all replicas."""
        ...

    def stand_still(self) -> int:
        """Updates nothing any more: a rank was lost. The steps since the last agreement that `served` is ahead."""
        ...

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What a step calls to update its replica; `optimizer` updates what this rank is to update (`served`)."""
        ...

    def take_figures(self) -> Mapping[str, float]:
        """The strategy's own measurements of the last step, by name."""
        ...

    def before_step(self, weight: float = 1.0) -> None:
        """Before the first change that step makes. `weight`: that of this rank's samples of it."""
        ...

    @property
    def skips_step(self) -> bool:
        """Whether other replicas have made the next step already, so that this one's part would come too late."""
        ...

    def looking_up(self) -> AbstractContextManager[None]:
        """Around forwards between two steps, such as an evaluation's. Every rank enters, and leaves when it is done."""
        ...

    def after_update(self, step: int, taken: Taken) -> Agreed | None:
        """After the optimizer's step `step`, in which the ranks in lock-step did what `taken` says; None if replicas
        did not agree in it.
        """
        ...


class OwnOptimizer:
    """What an `Agreement` answers where each replica's optimizer updates all that the replica has."""

    served: Sequence[Owned] | None = None
    carried: Carried = "nothing"
    skips_step: bool = False

    def stand_still(self) -> int:
        return 0

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def take_figures(self) -> Mapping[str, float]:
        return {}

    def looking_up(self) -> AbstractContextManager[None]:
        return nullcontext()


class OwnSteps:
    """What a `Sync` answers where replicas take steps of their own: gradients are summed inside a replica alone."""

    lockstep_axes: tuple[Axis, ...] = INSIDE_REPLICA
    exchange: NewExchange = AllReduce
    keeps_replicas_equal = False

    def gradient_ranks(self, holding: Holding) -> Ranks:
        return holding.inside


class Sync(Protocol):
    """One strategy, in one generation of the membership."""

    @property
    def lockstep_axes(self) -> tuple[Axis, ...]:
        """The axes of the ranks that take every step together: all, or those inside a replica."""
        ...

    @property
    def exchange(self) -> NewExchange:
        """What the ranks that sum a gradient do with its buckets."""
        ...

    @property
    def keeps_replicas_equal(self) -> bool:
        """Whether replicas have the same parameters and optimizer state after every step."""
        ...

    def gradient_ranks(self, holding: Holding) -> Ranks:
        """The ranks over which the gradient of a part is summed in every step."""
        ...

    def agreement(self, replica: Replica) -> Agreement:
        """The running side, for this rank's part of its replica, whose training has not begun."""
        ...


# The strategy that a run file asks for.


def build_sync(config: SyncConfig, mesh: Mesh) -> Sync:
    """On this rank of `mesh`. Every rank calls it at the same point: it may open groups."""
    return implementation_of(config)(config, mesh)


# Synchronous data parallelism: all replicas sum their gradients in every step, and so make the same update.
#
# In canonical order they sum the gradients of logical shards of the batch, as many whatever the number of replicas, in
# one fixed tree (`comm.exchanges.exchange`); each shard is a microbatch.


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
