"""Synchronous data parallelism: gradients are summed over the replicas in every step.

The losses were divided by the global denominator before the backward, so the sum is the gradient of the global loss;
nothing is averaged. Parameters then stay equal because equal gradients meet equal optimizer states.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.comm.reducer import Reducer
from shoal.sync.config import AllReduce


class AllReduceSync:
    """The `Sync` of kind "allreduce" over the group of the replicas."""

    def __init__(self, config: AllReduce, parameters: Sequence[tuple[str, Parameter]], replicas: Collective) -> None:
        self._reducer = Reducer(
            parameters,
            replicas if replicas.size > 1 else None,
            bucket_bytes=config.bucket_bytes,
            first_bucket_bytes=config.first_bucket_bytes,
        )

    def start(self) -> None:
        self._reducer.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._reducer.backward(last=last)

    def gradients(self) -> Tensor:
        return self._reducer.finish()

    def scale(self, factor: float | Tensor) -> None:
        self._reducer.scale(factor)

    def parameters(self) -> None:
        """Nothing to do: equal gradients have met equal states."""

    def close(self) -> None:
        self._reducer.close()
