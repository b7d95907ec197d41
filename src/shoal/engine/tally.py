"""What a step counts before its backward: the denominator of the loss, samples, tokens, who wants to stop, and whose
buffers move.

Each rank counts its own microbatches; one small all-reduce, hidden behind the first forward, adds them up. So every
rank divides by the same global denominator, and all learn in the same step that one of them was told to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.data.sample import Batch
from shoal.engine.meeting import Meeting
from shoal.errors import DataError


@dataclass(frozen=True)
class Tally:
    """Sums over all ranks of the agreement domain."""

    denominator: float
    samples: int
    tokens: int
    stop: bool
    buffers_move: bool = False


class PendingTally:
    """A tally under way; `wait` gives it."""

    def __init__(
        self,
        microbatches: Sequence[Batch],
        group: Collective,
        *,
        stop: bool,
        device: torch.device,
        buffers_move: bool = False,
    ) -> None:
        own = [
            sum(batch.weight for batch in microbatches),
            sum(batch.real_samples for batch in microbatches),
            sum(_tokens(batch.weights) for batch in microbatches),
            float(stop),
            float(buffers_move),
        ]
        self._sums = Meeting("the next step", own, group, device=device)
        self._tally: Tally | None = None

    def wait(self) -> Tally:
        """Raises `DataError` where the whole global batch weighs nothing: there is nothing to average over; and
        `UserCodeError` where a rank does something else than the step.
        """
        if self._tally is not None:
            return self._tally
        denominator, samples, tokens, stop, buffers_move = self._sums.wait()
        if denominator <= 0:
            raise DataError(
                f"the weights of a global batch of {int(samples)} samples sum to {denominator:g}; the loss is divided "
                "by that sum. Every step needs at least one sample or token of positive weight"
            )
        self._tally = Tally(denominator, int(samples), int(tokens), stop > 0, buffers_move > 0)
        return self._tally


def _tokens(weights: Tensor) -> int:
    return int(torch.count_nonzero(weights)) if weights.ndim > 1 else 0
