"""The `Gradients` that a run file asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce, NewExchange
from shoal.comm.exchanges.pieces import PieceCodecs
from shoal.gradients.config import GradientsConfig
from shoal.gradients.flat import ALIGNMENT
from shoal.gradients.fully_sharded import FullyShardedGradients
from shoal.gradients.gradients import Gradients, Groups
from shoal.gradients.partition import GradientRanks, parts_by_size, parts_by_unit, units_of
from shoal.gradients.replicated import ReplicatedGradients
from shoal.gradients.sharded import ShardedGradients, beyond_shard
from shoal.gradients.unsummed import UnsummedGradients
from shoal.state.ownership import Trained
from shoal.topology.holding import Holding, Ranks

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
    if zero is None and _sums_nothing(trained, summing):
        return UnsummedGradients(trained, replica=replica)
    if zero is None:
        _open(groups, (summing.ranks(t.holding) for t in trained))
        return ReplicatedGradients(
            config, trained, ranks=summing.ranks, groups=groups, replica=replica, lockstep=summing.lockstep,
            exchange=summing.exchange,
        )  # fmt: skip
    if zero < 3:
        parts = parts_by_size(
            trained, summing.ranks, bytes_limit=config.bucket_size, first_bytes=config.first_bucket_bytes, divided=True
        )
    else:
        parts = parts_by_unit(trained, units_of(trained, blocks), summing.ranks)
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


def _sums_nothing(trained: Sequence[Trained], summing: Summing) -> bool:
    """Does every gradient of this rank stay as its backward leaves it? Nobody has a term of it, nothing codes it, and
    it is in the type in which sums are kept.
    """
    alone = all(len(summing.ranks(t.holding)) == 1 for t in trained)
    return alone and summing.exchange is AllReduce and all(t.parameter.dtype in SUMMED_IN for t in trained)


def _open(groups: Groups, wanted: Iterable[Ranks]) -> None:
    """Opens the groups in an order that is the same on every rank, so that no two wait for each other."""
    for ranks in sorted(set(wanted)):
        groups(ranks)
