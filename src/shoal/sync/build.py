"""The sync that a run file asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from shoal.comm.collective import Collective
from shoal.comm.ledger import Ledger
from shoal.gradients.config import GradientsConfig
from shoal.sync.allreduce import AllReduceSync, summands
from shoal.sync.owned import Trained, owned_whole
from shoal.sync.priority import PrioritySync
from shoal.sync.strategy import Sync
from shoal.sync.zero.chunk import chunks_by_size, chunks_by_unit, units_of
from shoal.sync.zero.passing_sync import PassingSync
from shoal.sync.zero.sharded_sync import ZeroSync
from shoal.topology.holding import Ranks


def build_sync(
    config: GradientsConfig,
    zero: int | None,
    trained: Sequence[Trained],
    *,
    model: nn.Module,
    groups: Callable[[Ranks], Collective],
    replica: Collective,
    blocks: Sequence[nn.Module] = (),
    world: Collective | None = None,
) -> Sync:
    """The strategy for this rank's part of a model. `zero`: what is cut over `shard`; None or 1, 2, 3.

    `trained` are its parameters that are trained, each once, in the order of the model. `groups` gives the group of
    some ranks of the world; `replica` are all ranks of this one's replica. `blocks` are the modules of `model`, called
    in this order, whose parameters ZeRO-3 gathers one after the other; `world` are all that train in lock-step, where
    the size of buckets is searched for. The parameters' memory may be moved: build the optimizer afterwards, on
    `Sync.owned`.
    """
    if zero is None:
        _open(groups, (t.holding.sums for t in trained))
        owned = [owned_whole(t) for t in trained]
        return AllReduceSync(config, summands(trained, groups), replica, owned=owned, world=world)
    if zero < 3:
        chunks = chunks_by_size(trained, config)
        _open(groups, (ranks for chunk in chunks for ranks in (chunk.shard, chunk.others)))
        return ZeroSync(trained, chunks, stage=zero, groups=groups, replica=replica)
    chunks = chunks_by_unit(trained, units_of(trained, blocks))
    _open(groups, (ranks for chunk in chunks for ranks in (chunk.shard, chunk.others)))
    return PassingSync(trained, chunks, model=model, blocks=blocks, groups=groups, replica=replica)


def build_priority_sync(
    config: GradientsConfig, trained: Sequence[Trained], *, model: nn.Module, lane: Collective, ledger: Ledger
) -> PrioritySync:
    """For replicas of one rank under `config.schedule` = "priority". `lane` are all of them, for its traffic alone."""
    owned = [owned_whole(t) for t in trained]
    found = summands(trained, lambda ranks: lane)
    return PrioritySync(config, found, lane, model=model, ledger=ledger, owned=owned)


def _open(groups: Callable[[Ranks], Collective], wanted: Iterable[Ranks]) -> None:
    """Opens the groups in an order that is the same on every rank, so that no two wait for each other."""
    for ranks in sorted(set(wanted)):
        groups(ranks)
