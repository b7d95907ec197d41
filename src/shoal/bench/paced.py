"""A rank that computes as slowly as it is told: its samples take so many seconds each, whatever the processor does.

Benchmarks and tests of uneven machines need ranks of known speed, also where ranks share cores. A paced rank waits
first and then computes, so that its gradients leave as late as those of a slow processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.data.sample import Batch
from shoal.engine.compute import Compute
from shoal.engine.forward_backward import Evaluated, ForwardBackward
from shoal.gradients.gradients import Gradients


@dataclass
class PacedForwardBackward:
    """`inner`, of which a sample takes `sample_s` seconds, if the processor can do it in that time.

    `sample_s` may be changed between two steps. An evaluation is not paced.
    """

    inner: ForwardBackward
    sample_s: float
    _work_s: float = field(default=0.0, init=False)

    @property
    def compute(self) -> Compute:
        return self.inner.compute

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        gradients: Gradients,
        factor: Callable[[], float],
        on_loss: Callable[[Tensor], None],
    ) -> None:
        begin_s = time.perf_counter()
        wanted_s = self.sample_s * sum(map(len, batches))
        time.sleep(max(0.0, wanted_s - self._work_s))
        work_s = time.thread_time()
        self.inner(batches, gradients=gradients, factor=factor, on_loss=on_loss)
        self._work_s = time.thread_time() - work_s
        time.sleep(max(0.0, begin_s + wanted_s - time.perf_counter()))

    def evaluate(self, batch: Batch) -> Evaluated | None:
        return self.inner.evaluate(batch)


def pace(context: Any, sample_s: float) -> PacedForwardBackward:
    """Paces the steps of a `RankContext` from here on."""
    context.forward_backward = PacedForwardBackward(context.forward_backward, sample_s)
    return context.forward_backward
