"""Mistakes to plant in a layout, each a context in which rank `rank` computes wrongly. The reference stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import PropertyMock, patch

import torch

from tests.ranks import TestPlace
from tests.verification.layouts import verified


@contextmanager
def all_reduce_left_out(rank: int) -> Iterator[None]:
    """The gradient at the entrance of a tensor-parallel region is not summed."""
    with patch("shoal.parallel.tensor.operators.enter", lambda x, group: x):
        yield


@contextmanager
def mean_for_sum(rank: int) -> Iterator[None]:
    """Gradients are averaged over two replicas, whose losses were already divided by the global denominator."""
    from shoal.comm.exchanges.exchange import AllReduce

    original = AllReduce.wait

    def averaged(self: Any) -> None:
        original(self)
        self.result.mul_(0.5)

    with patch.object(AllReduce, "wait", averaged):
        yield


@contextmanager
def bias_per_tensor_rank(rank: int) -> Iterator[None]:
    """The bias behind a row-wise layer, whose gradient every tensor rank has whole, is summed over them."""
    with _holding_of("feed_forward.2.bias", lambda h: replace(h, inside=h.holders, across=(h.rank,))):
        yield


@contextmanager
def norm_per_stage(rank: int) -> Iterator[None]:
    """Every rank counts what it holds, though others hold it too."""
    from shoal.topology.holding import Holding

    with patch.object(Holding, "counts", new_callable=PropertyMock, return_value=True):
        yield


@contextmanager
def wrong_group(rank: int) -> Iterator[None]:
    """One matrix's gradient is summed over no one, where context ranks hold terms of it."""
    with _holding_of("blocks.0.attention.query.weight", lambda h: replace(h, inside=(h.rank,), across=(h.rank,))):
        yield


@contextmanager
def microbatch_dropped(rank: int) -> Iterator[None]:
    """The last microbatch is left out of a pipeline."""
    from shoal.data.sample import padding_like
    from shoal.engine.microbatches import Uniform

    original = Uniform.__call__

    def shorter(self: Any, batches: Any) -> Any:
        arranged = original(self, batches)
        return [*arranged[:-1], padding_like(arranged[-1], len(arranged[-1]))]

    with patch.object(Uniform, "__call__", shorter):
        yield


@contextmanager
def wrong_rotary_offset(rank: int) -> Iterator[None]:
    """Every context rank counts its tokens from 0."""
    from shoal.engine import microbatches as sequence

    original = sequence._placed
    with patch.object(sequence, "_placed", lambda inputs, places: original(inputs, torch.arange(len(places)))):
        yield


@contextmanager
def auxiliary_unscaled(rank: int) -> Iterator[None]:
    """One rank does not divide the routers' own losses by the global denominator."""
    from shoal.engine import compute

    original = compute.set_auxiliary
    factor = 1.0 if rank else None

    def unscaled(model: Any, weights: Any, scale: float, **others: Any) -> Any:
        return original(model, weights, factor or scale, **others)

    with patch.object(compute, "set_auxiliary", unscaled):
        yield


@contextmanager
def stale_shard(rank: int) -> Iterator[None]:
    """One rank keeps a parameter of the step before."""
    from shoal.gradients.sharded import ShardedGradients

    build, original = ShardedGradients.__init__, ShardedGradients.gather

    def first(self: Any, *inputs: Any, **named: Any) -> None:
        build(self, *inputs, **named)
        self.victim = next(t.parameter for t in inputs[0] if t.holding.name == "blocks.0.attention.key.weight")

    def stepped(self: Any) -> None:
        before = self.victim.detach().clone()
        original(self)
        if rank:
            self.victim.data.copy_(before - 1e-3)

    with patch.object(ShardedGradients, "__init__", first), patch.object(ShardedGradients, "gather", stepped):
        yield


@contextmanager
def router_gradient_dropped(rank: int) -> Iterator[None]:
    """One rank's router learns nothing from its tokens."""
    from shoal.models.router import Router

    original = Router.forward

    def detached(self: Any, x: Any) -> Any:
        logits, scores = original(self, x)
        return (logits.detach(), scores.detach()) if rank else (logits, scores)

    with patch.object(Router, "forward", detached):
        yield


@contextmanager
def routed_otherwise(rank: int) -> Iterator[None]:
    """One rank's router prefers what it should avoid."""
    from shoal.models.router import Router

    original = Router.preferences

    def turned(self: Any, scores: Any) -> Any:
        return -original(self, scores) if rank else original(self, scores)

    with patch.object(Router, "preferences", turned):
        yield


@contextmanager
def stash_forgotten(rank: int) -> Iterator[None]:
    """An asynchronous pipeline's backwards run with the newest weights, not with those of their forwards."""
    from contextlib import nullcontext

    from shoal.parallel.pipeline.pipedream import Stash

    with patch.object(Stash, "restored", lambda self, microbatch: nullcontext()):
        yield


@contextmanager
def panel_unsummed(rank: int) -> Iterator[None]:
    """On a grid, the rank that has a panel of the weight keeps its own term of the gradient alone."""
    from shoal.parallel.tensor import summa

    original = summa._sum_to

    def own_term(group: Any, root: int, term: Any, target: Any) -> None:
        if target.shape[0] != term.shape[0] or group.size == 1:
            return original(group, root, term, target)
        if group.rank == root:
            target.copy_(term)
        return None

    with patch.object(summa, "_sum_to", own_term):
        yield


@contextmanager
def statistics_unsummed(rank: int) -> Iterator[None]:
    """Every rank keeps the running statistics of its own samples."""
    from shoal.comm.collective import Alone
    from shoal.engine.batch_statistics import StatisticsSync

    original = StatisticsSync.__init__

    def alone(self: Any, model: Any, group: Any) -> None:
        original(self, model, Alone())

    with patch.object(StatisticsSync, "__init__", alone):
        yield


@contextmanager
def rate_of_one_rank(rank: int) -> Iterator[None]:
    """One rank's schedule ends later than the others'."""
    from shoal.assembly.run import Run

    original = Run.rate
    with patch.object(Run, "rate", lambda self, number: original(self, max(1, number - rank))):
        yield


@contextmanager
def wrong_under_autocast(rank: int) -> Iterator[None]:
    """A gradient that is twice as large, in half precision alone."""
    from shoal.engine.forward_backward import SequentialForwardBackward

    original = SequentialForwardBackward._forward

    def doubled(self: Any, microbatch: Any, factor: Any) -> Any:
        loss = original(self, microbatch, factor)
        return loss if self.compute.precision.compute is None else 2 * loss - loss.detach()

    with patch.object(SequentialForwardBackward, "_forward", doubled):
        yield


@contextmanager
def masks_of_other_samples(rank: int) -> Iterator[None]:
    """One rank's dropout is keyed on the place in its own share."""
    from shoal.engine.randomness import Randomness

    original = Randomness.microbatch

    def shifted(self: Any, positions: Any, **others: Any) -> None:
        original(self, positions - 4 * rank, **others)

    with patch.object(Randomness, "microbatch", shifted):
        yield


@contextmanager
def shares_of_rank_0(rank: int) -> Iterator[None]:
    """Every rank takes the samples of rank 0."""
    from shoal.data import feed

    original = feed.share

    def first(interval: Any, *, replica: int, **others: Any) -> Any:
        return original(interval, replica=0, **others)

    with patch.object(feed, "share", first):
        yield


@contextmanager
def clipped_by_half_the_norm(rank: int) -> Iterator[None]:
    """Gradients are clipped to half of what the run file says."""
    from shoal.assembly import train_step

    original = train_step.clip_by_global_norm
    with patch.object(train_step, "clip_by_global_norm", lambda limit: original(limit / 2)):
        yield


@contextmanager
def buffers_not_rewound(rank: int) -> Iterator[None]:
    """Every microbatch of the layout begins with the buffers that the one before has left."""
    from shoal.engine.batch_statistics import StepBuffers

    original = StepBuffers.rewind

    def first_only(self: Any) -> None:
        original(self) if self._forwards == 0 else None

    with patch.object(StepBuffers, "rewind", first_only):
        yield


@contextmanager
def decay_left_out(rank: int) -> Iterator[None]:
    """The layout's optimizer does not decay weights."""
    from shoal.assembly import run_state

    original = run_state.build_optimizer

    def undecayed(config: Any, parameters: Any, **others: Any) -> Any:
        return original(config, [(name, parameter, False) for name, parameter, _ in parameters], **others)

    with patch.object(run_state, "build_optimizer", undecayed):
        yield


@contextmanager
def masters_rounded(rank: int) -> Iterator[None]:
    """After each update masters keep no more bits than the weights that the model computes with."""
    from shoal.gradients.masters import MasterWeights

    original = MasterWeights.gather

    def rounded(self: MasterWeights) -> None:
        original(self)
        self._masters.flat.copy_(self._computed.flat)

    with patch.object(MasterWeights, "gather", rounded):
        yield


def plant_of(fault: str) -> Callable[[int], AbstractContextManager[None]]:
    """What plants the mistake of this name, given the rank."""
    from tests.verification import planted_on_one_rank

    return globals().get(fault) or getattr(planted_on_one_rank, fault)


def verified_with(place: TestPlace, fault: str, tables: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """The verdict on a run with a fault, at rank 0."""
    with plant_of(fault)(place.rank):
        return verified(place, tables, folder, False, 2)


@contextmanager
def _holding_of(name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    from shoal.parallel import split

    original = split.held

    def changed(layout: Any, rank: int, own: str, shape: Any, **others: Any) -> Any:
        holding = original(layout, rank, own, shape, **others)
        return change(holding) if own == name else holding

    with patch.object(split, "held", changed):
        yield
