"""Measures the gradient noise scale while training: the gradient of a part of the batch beside that of all of it.

Each rank takes the norm of what it computed alone (`gradients.reducer.OwnGradient`); their mean over the ranks, and
that of the sum, which every step computes anyway, are the two batch sizes of `cost.noise_scale`. It costs one pass over
the gradients and an all-reduce of three numbers, in the steps in which it is due.

A gradient is a sum divided by the global denominator D, so that a part of weight D_r holds D_r / D of a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.comm.collective import Collective
from shoal.cost.noise_scale import Moments, MovingMoments, moments
from shoal.data.sample import Batch
from shoal.engine.tally import Tally
from shoal.gradients.reducer import OwnGradient

DECAY = 0.95
"""Of the moving averages, for each measurement: about twenty of them."""


@dataclass(frozen=True)
class NoiseReading:
    """The moments of one step, and their averages over this life of the run."""

    step: Moments
    mean: Moments

    def values(self) -> dict[str, float]:
        """Under the names of measurements; `noise/scale` counts samples."""
        return {"noise/scale": self.mean.scale, "noise/signal": self.step.signal, "noise/trace": self.step.trace}


class NoiseMeter:
    """Measures every `every` steps. `group`: all ranks; `counts`: is this rank the one that counts its samples?

    `separates_microbatches`: is a rank's first microbatch its part (else all that it has)? The averages are not in
    checkpoints: they start anew where a run goes on.
    """

    def __init__(
        self,
        own: OwnGradient,
        group: Collective,
        *,
        every: int,
        counts: bool,
        separates_microbatches: bool,
        device: torch.device,
    ) -> None:
        self._own, self._group, self._device = own, group, device
        self._every, self._counts, self._separates_microbatches = every, counts, separates_microbatches
        self._mean = MovingMoments(decay=DECAY)

    def start(self, step: int) -> None:
        """Before the sync starts its step."""
        self._own.wanted = step % self._every == 0

    def reading(self, batches: Sequence[Batch], tally: Tally, *, norm: float, scale: float) -> NoiseReading | None:
        """The noise of a finite step, `norm` being that of the whole gradient; None where it is not due.

        `scale` is the loss scale that is still in the gradients. Every rank calls it, or none does.
        """
        if not self._own.wanted:
            return None
        square, inverse, parts = self._over_ranks(
            batches[:1] if self._separates_microbatches else batches, tally, scale
        )
        one = moments(square / parts, norm**2, small_inverse=inverse / parts, big_inverse=1 / tally.samples)
        self._mean = self._mean.after(one)
        return NoiseReading(step=one, mean=self._mean.mean)

    def _over_ranks(self, part: Sequence[Batch], tally: Tally, scale: float) -> tuple[float, float, float]:
        """Sums over all parts: squared norms of their mean gradients, inverses of their samples, and how many."""
        weight, samples = sum(batch.weight for batch in part), sum(len(batch) for batch in part)
        own = self._own.square(self._device)
        square = own * (tally.denominator / (weight * scale)) ** 2 if weight else torch.zeros_like(own)
        counts = float(self._counts and weight > 0)
        mine = torch.tensor([counts / max(1, samples), counts], dtype=torch.float64, device=self._device)
        sums = torch.cat([square.reshape(1), mine])
        if self._group.size > 1:
            self._group.all_reduce(sums).wait()
        total, inverse, parts = sums.tolist()
        return total, inverse, parts
