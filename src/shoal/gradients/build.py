"""The `Gradients` that a run file asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective, home_of
from shoal.comm.exchanges.exchange import AllReduce, NewExchange, PieceCodecs
from shoal.errors import UserCodeError
from shoal.gradients.bucket import ALIGNMENT, GradientRanks, parts_by_size, parts_by_unit, units_of
from shoal.gradients.config import GradientsConfig
from shoal.gradients.fully_sharded import FullyShardedGradients
from shoal.gradients.gradients import Gradients, Groups, InLoops, OfWholeParameters, global_norm, scale_all
from shoal.gradients.masters import MasterWeights
from shoal.gradients.reducer import OwnGradient, check_empty
from shoal.gradients.replicated import ReplicatedGradients
from shoal.gradients.sharded import ShardedGradients, beyond_shard
from shoal.maths.norm import JointNorm, two_norm
from shoal.state import Owned, Trained, complete, gradients_of, owned_whole
from shoal.topology.holding import Holding, Ranks

# Gradients of a rank that has nobody to sum them with: they stay where autograd puts them.
#
# Without an exchange there is no bucket to fill, and so no copy and no hook. Autograd hands over a fresh tensor where
# `.grad` is None, and adds to it in later microbatches. What a plain loop does stays as cheap here as it is there.
#
# Between two microbatches of a step `.grad` of every parameter is None, or what a script is to see there: the sum is
# kept here, and goes back before the next backward. A script's `zero_grad` cannot wipe it.


class UnsummedGradients(OfWholeParameters):
    """`Gradients` of the `trained` parameters, each of which this rank alone sums. The norm adds up over `replica`."""

    tuned = None

    def __init__(self, trained: Sequence[Trained], *, replica: Collective) -> None:
        self.owned: Sequence[Owned] = [owned_whole(t) for t in trained]
        self.own = OwnGradient()
        self._trained, self._replica = trained, replica
        self._parameters = [t.parameter for t in trained]
        self._names = frozenset(t.holding.name for t in trained)
        self._counted = [index for index, t in enumerate(trained) if t.holding.counts]
        counted = [self._parameters[index] for index in self._counted]
        self._norm = JointNorm(counted) if counted else None
        self._device = home_of([each.parameter for each in trained[:1]], replica)
        self._sums: list[Tensor | None] | None = None
        self._between: list[Tensor | None] = [None] * len(trained)
        self._gradients: list[Tensor] = []
        self._held: list[Any] = []

    def start(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._sums, self._gradients, self._held = None, [], []
        self.own.start()

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        self._give_back()
        yield
        if self.own.open:
            self._look()
        if not last:
            self._sums = gradients_of(self._parameters)
            for parameter, shown in zip(self._parameters, self._between, strict=True):
                parameter.grad = shown

    def show_between(self, shown: Mapping[str, Tensor]) -> bool:
        self._between = [shown.get(trained.holding.name) for trained in self._trained]
        return True

    def schedule(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self) -> Tensor:
        self._gradients = self._filled()
        norm = self._norm_of(self._gradients)
        if self.own.open:
            self._look()
        return norm

    def scale(self, factor: float | Tensor) -> None:
        if self._gradients:
            scale_all(self._gradients, factor)

    @property
    def used(self) -> frozenset[str]:
        self._held = gradients_of(self._parameters)  # or PyTorch would make objects for them anew at the next look
        if complete(self._held):
            return self._names
        return frozenset(each.holding.name for each in self._trained if each.parameter.grad is not None)

    def gather(self) -> None:
        """Every parameter is whole here."""

    def close(self) -> None:
        """There are no hooks."""

    def _norm_of(self, gradients: Sequence[Tensor]) -> Tensor:
        """That of the whole model, of a gradient of every parameter. Raises for one that is sparse."""
        all_count = len(self._counted) == len(gradients)
        counted = gradients if all_count else [gradients[index] for index in self._counted]
        found = InLoops.found(counted)
        if found is None or not all_count:  # a loop goes through dense ones alone
            self._check_dense(gradients)
        own = None if self._norm is None else self._norm(counted) if found is None else found.norm()
        return global_norm(own, self._replica, device=self._device)

    def _give_back(self) -> None:
        """What earlier microbatches have added up, in the place of what was shown since."""
        shown = repeat(None) if self._sums is None else self._between
        if any(map(is_not, gradients_of(self._parameters), shown)):
            self._take_empty()
        if self._sums is not None:
            for parameter, gradient in zip(self._parameters, self._sums, strict=True):
                parameter.grad = gradient
            self._sums = None

    def _take_empty(self) -> None:
        """Takes away what a script has put there; raises `UserCodeError` for a gradient of its own."""
        for trained, shown in zip(self._trained, self._between, strict=True):
            gradient = trained.parameter.grad
            if gradient is not None and gradient is not shown:
                check_empty(trained.holding.name, gradient)
            trained.parameter.grad = None

    def _filled(self) -> list[Tensor]:
        """The gradient of every parameter; zero where the backward came to none."""
        found: list[Any] = self._held or gradients_of(self._parameters)
        if complete(found):
            return found
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        return gradients_of(self._parameters)

    def _check_dense(self, gradients: Sequence[Tensor]) -> None:
        for trained, gradient in zip(self._trained, gradients, strict=True):
            if gradient.is_sparse:
                raise UserCodeError(
                    f"the gradient of {trained.holding.name} is sparse; gradients must be dense: build the module with "
                    "sparse=False"
                )

    def _look(self) -> None:
        """The first part of this rank's samples is over: takes its norm."""
        counted = [(self._trained[index].holding.name, self._parameters[index].grad) for index in self._counted]
        self.own.add((name, two_norm(gradient)) for name, gradient in counted if gradient is not None)
        self.own.close()


SUMMED_IN = (torch.float32, torch.float64)
"""The types in which gradients are summed as they are."""


def all_replicas(holding: Holding) -> Ranks:
    """The `GradientRanks` of synchronous training: a gradient is the sum over all replicas."""
    return holding.sums


@dataclass(frozen=True)
class Summing:
    """How gradients are summed, by the choice of `[sync]` and the optimizer.

    `ranks` sum a gradient in every step, by `exchange`; `lockstep` are the ranks that take every step together, and
    search the size of buckets together; `undivided`: so many numbers of a parameter stay together on a rank, None: all
    of them. `pieces` code what the ranks of `shard` send each other.
    """

    ranks: GradientRanks = all_replicas
    exchange: NewExchange = AllReduce
    lockstep: Collective | None = None
    undivided: int | None = ALIGNMENT
    pieces: PieceCodecs = field(default_factory=PieceCodecs)


def build_gradients(
    config: GradientsConfig,
    trained: Sequence[Trained],
    *,
    zero: int | None,
    groups: Groups,
    replica: Collective,
    model: nn.Module,
    blocks: Sequence[nn.Module] = (),
    summing: Summing | None = None,
) -> Gradients:
    """The gradients of this rank's part of a model.

    `trained` are its trained parameters, each once, in the order of the model. `zero` is the stage of ZeRO over
    `shard`; None: nothing is divided. `replica` are the ranks whose norms add up; `blocks` the modules of `model`,
    called in this order, whose parameters ZeRO-3 gathers one after the other. The parameters' memory may be moved:
    build the optimizer afterwards, on `Gradients.owned`.
    """
    summing = summing or Summing()
    if zero is None:
        bare = [replace(t, master=None) for t in trained]
        whole = _of_whole_parameters(config, bare, groups=groups, replica=replica, summing=summing)
        mixed = any(t.master is not None for t in trained)
        return MasterWeights(whole, trained, replica=replica) if mixed else whole
    if zero < 3:
        parts = parts_by_size(
            trained, summing.ranks, bytes_limit=config.bucket_size, first_bytes=config.first_bucket_bytes, divided=True
        )
    else:
        parts = parts_by_unit(trained, units_of(trained, blocks, model), summing.ranks)
    _open(groups, (ranks for part in parts for ranks in (part.shard, beyond_shard(trained, part))))
    if zero < 3:
        return ShardedGradients(
            trained, parts, stage=zero, groups=groups, replica=replica, exchange=summing.exchange,
            undivided=summing.undivided, pieces=summing.pieces,
        )  # fmt: skip
    return FullyShardedGradients(
        trained, parts, model=model, blocks=blocks, groups=groups, replica=replica, exchange=summing.exchange,
        undivided=summing.undivided, pieces=summing.pieces,
    )  # fmt: skip


def _of_whole_parameters(
    config: GradientsConfig, trained: Sequence[Trained], *, groups: Groups, replica: Collective, summing: Summing
) -> UnsummedGradients | ReplicatedGradients:
    if _sums_nothing(trained, summing):
        return UnsummedGradients(trained, replica=replica)
    _open(groups, (summing.ranks(t.holding) for t in trained))
    return ReplicatedGradients(
        config, trained, ranks=summing.ranks, groups=groups, replica=replica, lockstep=summing.lockstep,
        exchange=summing.exchange,
    )  # fmt: skip


def _sums_nothing(trained: Sequence[Trained], summing: Summing) -> bool:
    """Does every gradient of this rank stay as its backward leaves it? Nobody has a term of it, nothing codes it, and
    it is in the type in which sums are kept.
    """
    alone = all(len(summing.ranks(t.holding)) == 1 for t in trained)
    return alone and summing.exchange is AllReduce and all(t.parameter.grad_dtype in SUMMED_IN for t in trained)


def _open(groups: Groups, wanted: Iterable[Ranks]) -> None:
    """Opens the groups in an order that is the same on every rank, so that no two wait for each other."""
    for ranks in sorted(set(wanted)):
        groups(ranks)
