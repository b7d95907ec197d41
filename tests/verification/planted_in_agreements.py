"""Mistakes to plant in how replicas agree, each a context on rank `rank`. What one process plays stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from shoal.maths.mixing import Matrix
from shoal.sync.config import GossipConfig
from shoal.sync.easgd import EASGDAgreement
from shoal.sync.gossip import GossipAgreement
from shoal.sync.local import LocalAgreement, Period
from shoal.sync.outer import OuterStep
from shoal.sync.push_sum import PushSum
from shoal.sync.server_part import ServedPart
from shoal.sync.streaming import StreamingAgreement
from tests.ranks import TestPlace
from tests.verification.layouts import verified


def momentum_left_out(rank: int) -> AbstractContextManager[Any]:
    """The outer step is that of an optimizer without momentum."""
    return patch.object(OuterStep, "_step", lambda self, change, momentum, unit: self._config.outer_lr * change)


def momentum_of_the_step_before(rank: int) -> AbstractContextManager[Any]:
    """The outer gradient goes into the momentum after the step that it belongs to."""

    def stale(self: Any, change: Any, momentum: Any, unit: float) -> Any:
        config, before = self._config, momentum.clone()
        momentum.mul_(config.outer_momentum).add_(change / unit)
        return config.outer_lr * (change + config.outer_momentum * before)

    return patch.object(OuterStep, "_step", stale)


def momentum_not_in_units_of_the_rate(rank: int) -> AbstractContextManager[Any]:
    """SlowMo's gamma is 1."""
    return patch.object(LocalAgreement, "_unit", lambda self: 1.0)


def replicas_count_alike(rank: int) -> AbstractContextManager[Any]:
    """The mean of uneven replicas does not know how many samples each of them took."""
    return patch.object(OuterStep, "_share", lambda self, weight: 1.0)


def parameters_are_merged_as_one(rank: int) -> AbstractContextManager[Any]:
    """Adasum over the whole model in the place of each parameter."""
    from shoal.comm.exchanges.adasum import Adasum
    from shoal.comm.exchanges.exchange import Segment

    return _after(Adasum, lambda self: setattr(self, "_segments", [Segment("all", 0, (self.result.numel(),))]))


def a_replica_keeps_its_own(rank: int) -> AbstractContextManager[Any]:
    """The last replica does not take over what was agreed."""
    from shoal.sync.flat_copy import FlatCopy

    return patch.object(FlatCopy, "write", lambda self, values=None: None) if rank else nullcontext()


def period_never_shrinks(rank: int) -> AbstractContextManager[Any]:
    """AdaComm that does not adapt."""
    return patch.object(Period, "agreed", lambda self, step, **others: setattr(self, "_agreed", step))


def pull_as_if_alone(rank: int) -> AbstractContextManager[Any]:
    """alpha = beta, not beta / replicas."""
    return _after(EASGDAgreement, lambda self: setattr(self, "_alpha", self._config.beta))


def fragments_replace_parameters(rank: int) -> AbstractContextManager[Any]:
    """Streaming that keeps nothing of a replica's own."""

    def without_mixing(self: Any) -> None:
        for fragment in self._fragments:
            fragment._mixing = 0.0

    return _after(StreamingAgreement, without_mixing)


def weights_of_another_graph(rank: int) -> AbstractContextManager[Any]:
    """Doubly stochastic, connected, and not the graph's: neighbours get less."""
    original = GossipConfig.matrices

    def weaker(self: GossipConfig, replicas: int) -> tuple[Matrix, ...]:
        return tuple(
            tuple(tuple(w / 2 + (i == j) / 2 for j, w in enumerate(row)) for i, row in enumerate(matrix))
            for matrix in original(self, replicas)
        )

    return patch.object(GossipConfig, "matrices", weaker)


def edges_turned_round(rank: int) -> AbstractContextManager[Any]:
    """Replicas send along the exponential graph the other way: W transposed."""
    original = GossipConfig.matrices

    def turned(self: GossipConfig, replicas: int) -> tuple[Matrix, ...]:
        return tuple(tuple(zip(*matrix, strict=True)) for matrix in original(self, replicas))

    return patch.object(GossipConfig, "matrices", turned)


def not_divided_by_the_weight(rank: int) -> AbstractContextManager[Any]:
    """Push-sum whose gradients are taken at x."""
    return patch.object(GossipAgreement, "_estimate", lambda self: self._node.x)


def a_share_is_lost(rank: int) -> AbstractContextManager[Any]:
    """The last rank takes in no share of rank 0."""
    original = PushSum.receive
    return patch.object(
        PushSum, "receive", lambda self, share: bool(rank and share.source == 0) or original(self, share)
    )


def a_worker_does_not_count(rank: int) -> AbstractContextManager[Any]:
    """A server makes its update without the last worker's gradient."""
    original = ServedPart._make

    def fewer(self: ServedPart, update: Any) -> None:
        for contribution in sorted(update.contributions)[1:]:
            self._sent[contribution] = self._sent[contribution]._replace(gradient=None)
        original(self, update)

    return patch.object(ServedPart, "_make", fewer)


def served_with_a_stale_gradient(rank: int) -> AbstractContextManager[Any]:
    """One server adds half of the gradient of the update before."""
    original = ServedPart._weighed

    def stale(self: Any, contribution: Any, tau: int, mean: float) -> Any:
        found = original(self, contribution, tau, mean)
        before, self.before = getattr(self, "before", torch.zeros_like(found)), found.clone()
        return found + before / 2 if rank else found

    return patch.object(ServedPart, "_weighed", stale)


def gradient_of_one_replica(rank: int) -> AbstractContextManager[Any]:
    """No mistake of the agreement: the last replica's gradient is twice as large."""
    from shoal.gradients.build import UnsummedGradients

    original = UnsummedGradients.reduce

    def doubled(self: Any) -> Any:
        norm = original(self)
        for owned in self.owned:
            owned.parameter.grad.mul_(2.0)
        return norm

    return patch.object(UnsummedGradients, "reduce", doubled) if rank else nullcontext()


def verified_with(place: TestPlace, fault: str, tables: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """The verdict on a strategy with a fault, at rank 0."""
    plant: Callable[[int], AbstractContextManager[Any]] = globals()[fault]
    with plant(place.rank if place.rank == place.size - 1 else 0):
        return verified(place, tables, folder, False, None)


def _after(agreement: type, change: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """`change` of an agreement when it was built."""
    build = agreement.__init__

    def built(self: Any, *inputs: Any, **named: Any) -> None:
        build(self, *inputs, **named)
        change(self)

    return patch.object(agreement, "__init__", built)
