"""A step whose end is not waited for: every parameter is updated when its sum is there, in the next forward.

    step n      forward (updates of n - 1, each before its module) | backward | loss
    step n + 1  forward (updates of n, ...)                        | ...

It computes what `TrainStep` does, without clipping. What is known only when all sums are there comes late:

- The norm of a step is that of the step before, but for the first ones and where somebody looks.
- A loss that is not finite is known before any update: such a step is skipped. A gradient that is not finite, of a
  loss that is, shows when a part of the update is made. That cannot be skipped: it ends the run.
- What is sent between two steps is booked for the second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.data.sample import Batch
from shoal.engine.step_context import GlobalSum, StepContext
from shoal.engine.step_result import StepResult
from shoal.errors import Diverged
from shoal.optim.build import part_of, set_rate
from shoal.sync.priority import PrioritySync


class PriorityStep:
    """`Step` over a `PrioritySync`, without a loss scale."""

    def __init__(self, context: StepContext, *, optimizer: torch.optim.Optimizer, sync: PrioritySync) -> None:
        self.context, self.sync = context, sync
        self._parts = [part_of(optimizer, parameters) for parameters in sync.parts]
        self._number, self._lr, self._update_s = 0, 0.0, 0.0
        sync.update = self._update

    def __call__(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        lr: float,
        stop: bool = False,
        look: Callable[[float], None] | None = None,
    ) -> StepResult:
        """As `TrainStep`, but `look` is called behind the update, and makes the step wait for it.

        Raises `Diverged` where the gradient of the step before was not finite, though its loss was.
        """
        self._update_s = 0.0
        self.context.begin(step)
        self.sync.start()
        tally, loss = self.context.tally(batches, stop=stop), GlobalSum(self.context.group)
        factor = lambda: 1.0 / tally.wait().denominator  # noqa: E731
        self.context.passes.train(batches, sync=self.sync, factor=factor, known=loss.start)
        counted = tally.wait()
        global_loss = loss.wait() / counted.denominator
        finite = math.isfinite(global_loss)
        self._number, self._lr = step, lr
        self.sync.release(commit=finite)
        norm = float(self.sync.gradients() if self.sync.rehearses or look is not None else self.sync.norm)
        if look is not None:
            look(norm)
        self.context.finish(committed=finite)
        return self.context.result(
            loss=global_loss, norm=norm, scale=1.0, committed=finite, tally=counted, update_s=self._update_s
        )

    def _update(self, part: int, norm: Tensor) -> None:
        """The sums of some parameters are there."""
        if not math.isfinite(norm):
            raise Diverged(
                f"step {self._number} had a finite loss and a gradient that is not finite, of which a part has been "
                'applied already, because gradients.schedule = "priority": go on from the newest checkpoint with a '
                'smaller optimizer.lr, or with gradients.schedule = "order", which skips such steps'
            )
        begin_s = time.perf_counter()
        set_rate(self._parts[part], self._lr)
        self._parts[part].step()
        self._update_s += time.perf_counter() - begin_s
