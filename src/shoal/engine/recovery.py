"""What to do when a step was not finite: skip it, count it, and give up after too many in a row, naming the culprit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.comm.collective import Collective
from shoal.comm.words import gather_texts
from shoal.data.sample import Batch
from shoal.engine.nonfinite import first_nonfinite
from shoal.engine.precision import SMALLEST_SCALE, LossScaler
from shoal.engine.step_protocol import Step
from shoal.engine.step_result import StepResult
from shoal.errors import Diverged


@dataclass
class NonfiniteGuard:
    """Counts non-finite steps in a row. An overflow that a smaller loss scale may cure does not count.

    `forward`: may a rank run its model alone, to find the module? Not where it holds a part of one.
    """

    limit: int
    step: Step
    group: Collective
    forward: bool = True
    in_a_row: int = 0

    def check(
        self, number: int, result: StepResult, microbatches: Sequence[Batch], *, warn: Callable[[str], None]
    ) -> None:
        """Tells of a skipped step. Raises `Diverged` at the limit, on every rank alike."""
        if result.committed:
            self.in_a_row = 0
            return
        if _scale_was_too_large(result, self.step.context.scaler):
            warn(f"step {number} overflowed and was skipped; the loss scale is now {self.step.context.scaler.scale:g}")
            return
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            culprit = self._culprit(microbatches)
            raise Diverged(f"{self.in_a_row} steps in a row were not finite, the last was step {number}. {culprit}")
        warn(
            f"step {number} was not finite (loss {result.loss}, gradient norm {result.norm}) and was skipped: "
            f"{self.in_a_row} in a row; at {self.limit} the run stops"
        )

    def _culprit(self, microbatches: Sequence[Batch]) -> str:
        for rank, text in enumerate(
            gather_texts(self._own_culprit(microbatches), self.group, device=self.step.context.device)
        ):
            if text:
                return f"The first value that was not finite: {text} (rank {rank})"
        return "Parameters, samples and outputs are finite when looked at alone: the gradient overflowed; lower the lr"

    def _own_culprit(self, microbatches: Sequence[Batch]) -> str:
        try:
            return first_nonfinite(self.step.context.passes.compute, microbatches, forward=self.forward) or ""
        except Exception as error:  # the others wait for a text from this rank, whatever happens here
            return f"unknown, as looking for it raised {type(error).__name__}: {error}"


def _scale_was_too_large(result: StepResult, scaler: LossScaler) -> bool:
    """A finite loss whose scaled gradient overflowed, at a scale that can shrink."""
    return scaler.dynamic and result.scale > SMALLEST_SCALE and math.isfinite(result.loss)
