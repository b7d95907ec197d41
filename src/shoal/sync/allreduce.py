"""Synchronous data parallelism: gradients are summed in every step, each over the ranks that share its parameter.

The losses were divided by the global denominator before the backward, so the sum is the gradient of the global loss;
nothing is averaged. Parameters then stay equal because equal gradients meet equal optimizer states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.buckets.own_gradient import OwnGradient
from shoal.comm.buckets.reducer import Reducer
from shoal.comm.buckets.summed import Summand, summed_buckets
from shoal.comm.collective import Collective
from shoal.gradients.config import GradientsConfig
from shoal.sync.bucket_search import BucketSearch, candidates
from shoal.sync.norm import global_norm
from shoal.sync.owned import Owned, Trained
from shoal.topology.holding import Ranks


def replicated(parameters: Iterable[tuple[str, Parameter]], replicas: Collective) -> list[Summand]:
    """The parameters of replicas of one rank."""
    return [Summand(name, parameter, replicas) for name, parameter in parameters]


def summands(trained: Iterable[Trained], groups: Callable[[Ranks], Collective]) -> list[Summand]:
    """What each holding says. `groups` gives the group of some ranks of the world."""
    return [Summand(t.holding.name, t.parameter, groups(t.holding.sums), t.holding.counts) for t in trained]


class AllReduceSync:
    """The `Sync` of kind "allreduce". `replica`: all ranks of this rank's replica.

    `world`: all that train in lock-step; together they find the size of buckets where `config.bucket` is "auto".
    """

    def __init__(
        self,
        config: GradientsConfig,
        summands: Sequence[Summand],
        replica: Collective,
        *,
        owned: Sequence[Owned] = (),
        world: Collective | None = None,
    ) -> None:
        self.owned, self.own = owned, OwnGradient()
        self._summands, self._config, self._replica, self._world = summands, config, replica, world
        self._device = summands[0].parameter.device if summands else torch.device("cpu")
        self._sharing = _norm_group(summands) if replica.size == 1 else None
        self.remembered = None if config.bucket == "fixed" or world is None else self._search(world)
        self._cut(config.bucket_size if self.remembered is None else self.remembered.size)
        self._begin_s = 0.0

    def start(self) -> None:
        if self.remembered is not None and self.remembered.size != self._bucket_bytes:
            self._reducer.close()
            self._cut(self.remembered.size)
        self._begin_s = time.perf_counter()
        self._reducer.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._reducer.backward(last=last)

    def schedule(self) -> AbstractContextManager[None]:
        return self._reducer.schedule()

    def gradients(self) -> Tensor:
        norm = global_norm(self._reducer.finish(), self._sharing or self._replica, device=self._device)
        if self.remembered is not None and self.remembered.chosen is None:
            self.remembered.note(self._slowest(time.perf_counter() - self._begin_s))
        return norm

    def scale(self, factor: float | Tensor) -> None:
        for bucket in self._buckets:
            bucket.scale(factor)

    def parameters(self) -> None:
        """Nothing to do: equal gradients have met equal states."""

    def settle(self) -> None:
        """Nothing is under way between two steps."""

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._reducer.close()

    def _cut(self, bucket_bytes: int) -> None:
        """Makes buckets of this size, which is then that of the first one too where it is smaller."""
        self._bucket_bytes, first_bytes = bucket_bytes, min(self._config.first_bucket_bytes, bucket_bytes)
        self._buckets = summed_buckets(
            self._summands, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bytes,
            share_norm=self._sharing is not None,
        )  # fmt: skip
        self._reducer = Reducer([(s.name, s.parameter) for s in self._summands], self._buckets, own=self.own)

    def _search(self, world: Collective) -> BucketSearch:
        """Among the same sizes on all ranks, whatever part of the model each has."""
        own = sum(summand.parameter.nbytes for summand in self._summands)
        return BucketSearch(candidates(int(_largest(own, world, self._device))))

    def _slowest(self, own_s: float) -> float:
        assert self._world is not None, "without it there is no search"
        return _largest(own_s, self._world, self._device)


def _norm_group(summands: Sequence[Summand]) -> Collective | None:
    """The ranks that share the norm, each taking that of its part: all have the same sums, and count all of them."""
    groups = {id(summand.group): summand.group for summand in summands}
    if len(groups) != 1 or not all(summand.counted for summand in summands):
        return None
    (group,) = groups.values()
    return group if group.size > 1 else None


def _largest(own: float, group: Collective, device: torch.device) -> float:
    """The largest of all ranks' numbers."""
    found = torch.tensor(own, dtype=torch.float64, device=device)
    group.all_reduce(found, "max").wait()
    return float(found)
