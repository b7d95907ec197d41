"""One step, as the data sees it: count, forward, backward, agree, vote, commit or skip."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from shoal.data.sample import Batch
from shoal.engine.noise import NoiseMeter, NoiseReading
from shoal.engine.step_context import GlobalSum, StepContext
from shoal.engine.step_result import StepResult
from shoal.engine.tally import PendingTally, Tally
from shoal.optim.build import set_rate
from shoal.sync.strategy import Sync


class TrainStep:
    """Computes one update from this rank's samples. `noise`: where the gradient's noise is to be measured."""

    def __init__(
        self,
        context: StepContext,
        *,
        optimizer: torch.optim.Optimizer,
        sync: Sync,
        clip_norm: float | None,
        noise: NoiseMeter | None = None,
    ) -> None:
        self.context, self.sync = context, sync
        self._optimizer, self._clip_norm, self._noise = optimizer, clip_norm, noise

    def __call__(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        lr: float,
        stop: bool = False,
        look: Callable[[float], None] | None = None,
    ) -> StepResult:
        """Raises `CollectiveError` where a rank is lost; a non-finite loss or gradient makes `committed` false.

        `look` is called with the norm when every gradient is agreed, before the optimizer changes anything.
        """
        context, scale = self.context, self.context.scaler.scale
        context.ledger.take()  # what an evaluation has sent belongs to no step
        context.begin(step)
        if self._noise is not None:
            self._noise.start(step)
        self.sync.start()
        tally, loss = context.tally(batches, stop=stop), GlobalSum(context.group)
        context.passes.train(batches, sync=self.sync, factor=lambda: self._factor_of(tally), known=loss.start)
        counted, backward_s, waited_s = tally.wait(), time.perf_counter(), context.ledger.total().exposed_s
        norm = float(self.sync.gradients()) / scale
        if look is not None:
            look(norm)
        global_loss = loss.wait() / counted.denominator
        noise = self._noise_reading(batches, counted, norm, global_loss)
        committed = self._commit_or_skip(norm, global_loss, lr)
        update_s = time.perf_counter() - backward_s - (context.ledger.total().exposed_s - waited_s)
        return context.result(
            loss=global_loss, norm=norm, scale=scale, committed=committed, tally=counted, update_s=update_s, noise=noise
        )

    def _noise_reading(self, batches: Sequence[Batch], tally: Tally, norm: float, loss: float) -> NoiseReading | None:
        """Norm and loss are the same on every rank, so all of them measure or none."""
        if self._noise is None or not _finite(norm, loss):
            return None
        return self._noise.reading(batches, tally, norm=norm, scale=self.context.scaler.scale)

    def _factor_of(self, tally: PendingTally) -> float:
        """What the sum of losses is multiplied by before the backward."""
        return self.context.scaler.scale / tally.wait().denominator

    def _commit_or_skip(self, norm: float, loss: float, lr: float) -> bool:
        """The vote: norm and loss are sums over all ranks, so what is not finite anywhere shows on every rank."""
        finite = _finite(norm, loss)
        if finite:
            factor = self._factor(norm)
            if factor != 1.0:
                self.sync.scale(factor)
            set_rate(self._optimizer, lr)
            self._optimizer.step()
            self.sync.parameters()
        self.context.finish(committed=finite)
        self.context.scaler.update(finite=finite)
        return finite

    def _factor(self, norm: float) -> float:
        """What the gradient is multiplied by: one over the loss scale, and the clip to `clip_norm`."""
        clip = 1.0 if self._clip_norm is None or norm <= self._clip_norm else self._clip_norm / norm
        return clip / self.context.scaler.scale


def _finite(norm: float, loss: float) -> bool:
    return math.isfinite(norm) and math.isfinite(loss)
