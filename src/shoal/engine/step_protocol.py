"""`Step`: what the loop asks of a training step, whichever way its updates are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shoal.comm.collective import Collective
from shoal.data.sample import Batch
from shoal.engine.passes import Passes
from shoal.engine.precision import LossScaler
from shoal.engine.step import StepResult
from shoal.sync.strategy import Sync


class Step(Protocol):
    """Takes this rank's samples of a step to new weights. `group` are all ranks that train in lock-step."""

    @property
    def passes(self) -> Passes: ...

    @property
    def sync(self) -> Sync: ...

    @property
    def group(self) -> Collective: ...

    @property
    def scaler(self) -> LossScaler: ...

    @property
    def device(self) -> torch.device: ...

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
