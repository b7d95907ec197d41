"""Synchronous data parallelism: gradients are summed in every step, each over the ranks that share its parameter.

The losses were divided by the global denominator before the backward, so the sum is the gradient of the global loss;
nothing is averaged. Parameters then stay equal because equal gradients meet equal optimizer states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.comm.reducer import Reducer
from shoal.comm.summed_bucket import Summand, summed_buckets
from shoal.sync.config import AllReduce
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
    """The `Sync` of kind "allreduce". `replica`: all ranks of this rank's replica."""

    def __init__(
        self,
        config: AllReduce,
        summands: Sequence[Summand],
        replica: Collective,
        *,
        owned: Sequence[Owned] = (),
    ) -> None:
        self.owned = owned
        self._replica = replica
        self._device = summands[0].parameter.device if summands else torch.device("cpu")
        self._buckets = summed_buckets(
            summands, bucket_bytes=config.bucket_bytes, first_bucket_bytes=config.first_bucket_bytes
        )
        self._reducer = Reducer([(s.name, s.parameter) for s in summands], self._buckets)

    def start(self) -> None:
        self._reducer.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._reducer.backward(last=last)

    def schedule(self) -> AbstractContextManager[None]:
        return self._reducer.schedule()

    def gradients(self) -> Tensor:
        return global_norm(self._reducer.finish(), self._replica, device=self._device)

    def scale(self, factor: float | Tensor) -> None:
        for bucket in self._buckets:
            bucket.scale(factor)

    def parameters(self) -> None:
        """Nothing to do: equal gradients have met equal states."""

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._reducer.close()
