"""`Step`: what the loop asks of a training step, whichever way its updates are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.data.sample import Batch
from shoal.engine.step_context import StepContext
from shoal.engine.step_result import StepResult
from shoal.sync.strategy import Sync


class Step(Protocol):
    """Takes this rank's samples of a step to new weights."""

    @property
    def context(self) -> StepContext: ...

    @property
    def sync(self) -> Sync: ...

    def __call__(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        lr: float,
        stop: bool = False,
        look: Callable[[float], None] | None = None,
    ) -> StepResult:
        """See `TrainStep`."""
        ...
