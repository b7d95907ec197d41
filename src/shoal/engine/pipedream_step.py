"""A step of PipeDream: many updates, one after each microbatch, from gradients of weights that are some updates old.

With S stages, M microbatches and updates u of stage s's optimizer (PipeDream, SOSP 2019, section 3.3):

    w_s(j + 1) = w_s(j) - u(g_s(j)),    g(j) = gradient of microbatch j at w_0(j - S + 1), ..., w_{S-1}(j)

where versions before the step's first are the first. A step is one global batch: the pipeline fills at its start and
drains at its end, so that checkpoints, evaluations and the learning rate see one version of the weights.

- The loss of a microbatch is divided by its own weight, summed over all ranks that see parts of it; one that weighs
  nothing (padding) updates nothing.
- Stages are never at the same microbatch, so there is no norm of the whole gradient to clip by: each stage is clipped
  by the norm of its own.
- For the same reason nobody can vote: a stage leaves out an update whose gradient is not finite. The step then counts
  as skipped, though its other updates were made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.data.sample import Batch
from shoal.engine.pipelined import PipelinedPasses
from shoal.engine.step_context import GlobalSum, StepContext
from shoal.engine.step_result import StepResult
from shoal.optim.build import set_rate
from shoal.sync.strategy import Sync

Watch = Callable[[int], None]
"""Called with the number of a microbatch when its gradient is agreed, before the update."""


class PipeDreamStep:
    """`Step` of one stage. `sync` sums and measures the gradients of this rank's stage alone.

    `passes` are those of the context.
    """

    def __init__(
        self,
        context: StepContext,
        passes: PipelinedPasses,
        *,
        optimizer: torch.optim.Optimizer,
        sync: Sync,
        clip_norm: float | None,
    ) -> None:
        self.context, self.passes, self.sync = context, passes, sync
        self.optimizer, self.clip_norm = optimizer, clip_norm

    def __call__(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        lr: float,
        stop: bool = False,
        look: Callable[[float], None] | None = None,
        watch: Watch | None = None,
    ) -> StepResult:
        """As `TrainStep`, but `look` is called with the root mean square of the updates' norms, behind the last."""
        context = self.context
        context.ledger.take()  # what an evaluation has sent belongs to no step
        context.begin(step)
        self.sync.start()
        set_rate(self.optimizer, lr)
        tally, loss = context.tally(batches, stop=stop), GlobalSum(context.group)
        microbatches = self.passes.arrange(batches)
        weights = self._weights(microbatches)
        updates = _Updates(self, weights, watch)
        with self.sync.schedule():
            own_loss = self.passes.train_asynchronously(
                microbatches, factors=[1 / weight if weight else 0.0 for weight in weights], update=updates
            )
        counted, norm = tally.wait(), updates.norm(self.passes.group)
        loss.start(own_loss)
        global_loss = loss.wait() / counted.denominator
        if look is not None:
            look(norm)
        context.finish(committed=True)
        finite = math.isfinite(norm) and math.isfinite(global_loss)
        return context.result(
            loss=global_loss, norm=norm, scale=1.0, committed=finite, tally=counted, update_s=updates.spent_s
        )

    def _weights(self, microbatches: Sequence[Batch]) -> list[float]:
        """What each microbatch weighs on all ranks together."""
        own = [batch.weight if self.context.counts else 0.0 for batch in microbatches]
        weights = torch.tensor(own, dtype=torch.float64, device=self.context.device)
        self.context.group.all_reduce(weights).wait()
        return weights.tolist()


class _Updates:
    """The `Update` of a step: sum over the replicas, clip, optimizer."""

    def __init__(self, step: PipeDreamStep, weights: Sequence[float], watch: Watch | None) -> None:
        self._step, self._weights, self._watch = step, weights, watch
        self._squares: list[float] = []
        self.spent_s = 0.0

    def __call__(self, stage: int, microbatch: int) -> None:
        begin_s, waited_s = time.perf_counter(), self._step.context.ledger.total().exposed_s
        norm = float(self._step.sync.gradients())
        if self._weights[microbatch]:
            self._squares.append(norm**2)
            if self._watch is not None:
                self._watch(microbatch)
            if math.isfinite(norm):
                self._apply(norm)
        self._step.sync.start()
        self.spent_s += time.perf_counter() - begin_s - (self._step.context.ledger.total().exposed_s - waited_s)

    def norm(self, pipeline: Collective) -> float:
        """sqrt(mean over the updates of the squared norm of all stages together)."""
        total: Tensor = torch.tensor(sum(self._squares), dtype=torch.float64, device=self._step.context.device)
        pipeline.all_reduce(total).wait()
        return math.sqrt(float(total) / max(1, len(self._squares)))

    def _apply(self, norm: float) -> None:
        limit = self._step.clip_norm
        if limit is not None and norm > limit:
            self._step.sync.scale(limit / norm)
        self._step.optimizer.step()
        self._step.sync.parameters()
