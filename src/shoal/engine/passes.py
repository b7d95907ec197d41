"""Forward and backward of the microbatches of one step, on a rank that holds the whole chain of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.data.sample import Batch, map_tree
from shoal.engine.loss import Loss, call_model, weighted_sum
from shoal.engine.precision import Precision
from shoal.engine.randomness import Randomness
from shoal.sync.strategy import Sync

Arrange = Callable[[Sequence[Batch]], Sequence[Batch]]
"""From this rank's samples of a step to the microbatches that it computes."""


@dataclass(frozen=True)
class Judged:
    """A batch in evaluation: what the model said of it, and the loss of each sample or position."""

    batch: Batch
    outputs: Any
    losses: Tensor


@dataclass(frozen=True)
class Compute:
    """What turns a microbatch into its loss. `cut` gives this rank's part of every sample, where samples are split."""

    model: nn.Module
    loss: Loss
    precision: Precision
    device: torch.device
    randomness: Randomness
    cut: Callable[[Batch], Batch] = lambda batch: batch

    def prepared(self, batch: Batch) -> Batch:
        """This rank's part of `batch`, on the device and in the type of the parameters."""
        return on_device(self.cut(batch), self.device, self.precision.parameters)

    def judged(self, batch: Batch) -> Judged:
        """The forward of a `prepared` batch."""
        with self.precision.autocast(self.device):
            outputs = call_model(self.model, batch.inputs)
            return Judged(batch, outputs, self.loss(outputs, batch.targets))


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
    arrange: Arrange = lambda batches: batches
    counts: bool = True

    def train(
        self, batches: Sequence[Batch], *, sync: Sync, factor: Callable[[], float], known: Callable[[Tensor], None]
    ) -> None:
        microbatches = self.arrange(batches)
        total = torch.zeros((), dtype=torch.float64, device=self.compute.device)
        for index, batch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            loss_sum = self._forward(batch)
            total += loss_sum.detach()
            scale = factor()
            if last:
                known(total if self.counts else torch.zeros_like(total))
            with sync.backward(last=last):
                (loss_sum * scale).backward()

    def judge(self, batch: Batch) -> Judged | None:
        judged = self.compute.judged(self.compute.prepared(batch))
        return judged if self.counts else None

    def _forward(self, batch: Batch) -> Tensor:
        batch = self.compute.prepared(batch)
        self.compute.randomness.microbatch(batch.positions)
        return weighted_sum(self.compute.judged(batch).losses, batch.weights)


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on `device`, its floating inputs and targets in `dtype` (weights stay as they are)."""
    if device.type != "cpu":
        batch = batch.to(device, non_blocking=True)
    cast = lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf  # noqa: E731
    inputs, targets = map_tree(cast, batch.inputs), map_tree(cast, batch.targets)
    return Batch(inputs, targets, weights=batch.weights, positions=batch.positions)
