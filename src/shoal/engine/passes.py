"""Forward and backward of the microbatches of one step, on a rank that holds the whole chain of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.data.sample import Batch
from shoal.engine.compute import Compute, Microbatch
from shoal.engine.loss import weighted_sum
from shoal.sync.strategy import Sync

Arrange = Callable[[Sequence[Batch]], Sequence[Batch]]
"""From this rank's samples of a step to the microbatches that it computes."""


def as_they_are(batches: Sequence[Batch]) -> Sequence[Batch]:
    """The microbatches of the feed."""
    return batches


@dataclass(frozen=True)
class Judged:
    """A batch in evaluation: what the model said of it, and the loss of each sample or position."""

    batch: Batch
    outputs: Any
    losses: Tensor


class Passes(Protocol):
    """Everything between the samples and the gradients on one rank."""

    @property
    def compute(self) -> Compute:
        """What this rank computes with: its part of the model, the loss, the device."""
        ...

    def train(
        self, batches: Sequence[Batch], *, sync: Sync, factor: Callable[[], float], known: Callable[[Tensor], None]
    ) -> None:
        """Accumulates the gradient of `factor()` x the sum of the losses.

        `known` is called once, as soon as the sum of this rank's losses is there (float64, 0 where others count it).
        """
        ...

    def judge(self, batch: Batch) -> Judged | None:
        """Forward without gradients; None on a rank that other ranks count for."""
        ...


@dataclass(frozen=True)
class WholePasses:
    """One microbatch after the other, forward and backward. `counts`: are this rank's losses those that count?"""

    compute: Compute
    arrange: Arrange = as_they_are
    counts: bool = True

    def train(
        self, batches: Sequence[Batch], *, sync: Sync, factor: Callable[[], float], known: Callable[[Tensor], None]
    ) -> None:
        microbatches = self.arrange(batches)
        total = torch.zeros((), dtype=torch.float64, device=self.compute.device)
        for index, batch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            loss_sum = self._forward(self.compute.prepared(batch), factor)
            total += loss_sum.detach()
            scale = factor()
            if last:
                known(total if self.counts else torch.zeros_like(total))
            with sync.backward(last=last):
                (loss_sum * scale).backward()

    def judge(self, batch: Batch) -> Judged | None:
        own = self.compute.prepared(batch).batch
        outputs, losses = self.compute.losses(own)
        outputs = self.compute.gathered(outputs)
        return Judged(own, outputs, losses) if self.counts else None

    def _forward(self, microbatch: Microbatch, factor: Callable[[], float]) -> Tensor:
        self.compute.announce(microbatch, factor)
        _, losses = self.compute.losses(microbatch.batch)
        return weighted_sum(losses, microbatch.batch.weights)
