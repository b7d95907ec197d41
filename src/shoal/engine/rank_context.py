"""What a rank's steps stand on, and what every step begins and ends with, however it updates.

It begins with a model in training mode, with buffers, batch statistics and random numbers of its own, and with counting
what is trained on. It ends with those kept or taken back, and with an account of its seconds and bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.ledger import Entry, Ledger
from shoal.data.sample import Batch
from shoal.engine.batch_statistics import BufferGuard, StatisticsSync
from shoal.engine.forward_backward import ForwardBackward
from shoal.engine.precision import LossScaler
from shoal.engine.tally import NoiseReading, PendingTally, StepResult, StepTimes, Tally, read_numbers
from shoal.models.mixture import mixtures_of
from shoal.state import works_in_streams
from shoal.sync.strategy import Agreed


@dataclass
class RankContext:
    """One rank in one generation of the membership.

    `lockstep` are the ranks that take every step together: they count, vote and stop together, as the strategy of
    `[sync]` says. `data_parallel_group` are those of them that hold the same layers and see other samples, or other
    tokens. `counts`: this rank's samples are counted, and not those of another rank that sees the same.
    """

    forward_backward: ForwardBackward
    lockstep: Collective
    data_parallel_group: Collective
    ledger: Ledger
    scaler: LossScaler
    counts: bool = True

    def __post_init__(self) -> None:
        self.model, self.device = self.forward_backward.compute.model, self.forward_backward.compute.device
        compute = self.forward_backward.compute
        compute.train()
        self._statistics = StatisticsSync(self.model, self.data_parallel_group)
        self._guard = BufferGuard(compute.buffers, self.data_parallel_group)
        self.mixtures = mixtures_of(self.model)
        self._begin_s = 0.0

    def begin(self, step: int, *, samples: int | None = None) -> None:
        """Prepares the model for a step of so many `samples` of all ranks; None: of a whole one."""
        self._begin_s = time.perf_counter()
        compute = self.forward_backward.compute
        if not self.model.training:  # after an evaluation
            compute.train()
        if compute.global_batch is not None:
            compute.global_batch.step(samples)
        compute.buffers.start()
        compute.randomness.step(step)

    def tally(self, batches: Sequence[Batch], *, stop: bool) -> PendingTally:
        """Starts counting what all ranks train on, and who asks to stop."""
        counted, moving = batches if self.counts else (), self._guard.moving
        return PendingTally(counted, self.lockstep, stop=stop, device=self.device, buffers_move=moving)

    def agree_on_buffers(self, tally: Tally) -> None:
        """All ranks sum or compare what the forwards changed beside the parameters. Done before an update, a rank that
        is lost meanwhile leaves the others with the state of the step before; else `finish` does it, after the update.
        """
        self._statistics.sum()
        self._guard.compare(moving_anywhere=tally.buffers_move)

    def keep_statistics(self) -> None:
        """Behind an update, before a script goes on: running statistics are those of its step. `finish` follows."""
        self._statistics.keep()

    def finish(self, tally: Tally, *, committed: bool) -> None:
        """Keeps what the forward changed beside the parameters, or takes it back."""
        self._statistics.finish(committed=committed)
        self._guard.finish(committed=committed, moving_anywhere=tally.buffers_move)

    def result(
        self,
        *,
        loss: float,
        norm: float,
        scale: float,
        committed: bool,
        tally: Tally,
        update_s: float,
        agreed: Agreed | None,
        noise: NoiseReading | None = None,
    ) -> StepResult:
        """The step is over. `update_s`: seconds from the end of the backward on, waits for the wire left out."""
        wire = self.ledger.take()
        total = sum(wire.values(), start=Entry())
        all_s = time.perf_counter() - self._begin_s
        times = StepTimes(all_s - total.exposed_s - update_s, total.exposed_s, update_s)
        return StepResult(loss, norm, scale, committed, tally, times, total.bytes_sent, agreed, noise, wire)


class GlobalSum:
    """A sum over the ranks of `group`, under way behind the backward."""

    def __init__(self, group: Collective) -> None:
        self._group, self._handle = group, None
        self._total: Tensor | None = None

    def start(self, own: Tensor) -> None:
        """This rank's part, which must not change any more."""
        self._total = own
        self._handle = self._group.all_reduce(own) if self._group.size > 1 else None

    def tensor(self) -> Tensor:
        """The sum, a scalar on the device: the host need not wait for it."""
        if self._handle is not None:
            self._handle.wait()
        return torch.zeros(()) if self._total is None else self._total

    def wait(self) -> float:
        """The sum."""
        return float(self.tensor())

    def wait_beside(self, number: Tensor) -> tuple[float, float]:
        """`number`, a scalar on the device, and the sum, for which the host waits once."""
        if not works_in_streams(number.device):
            return float(number), self.wait()
        own, total = read_numbers(torch.stack([number.double(), self.tensor().double().to(number.device)]))
        return own, total


class UpdateClock:
    """Seconds since it was made, without those exposed to the wire."""

    def __init__(self, context: RankContext) -> None:
        self._ledger = context.ledger
        self._begin_s, self._exposed_s = time.perf_counter(), self._ledger.exposed_s

    def seconds(self) -> float:
        return time.perf_counter() - self._begin_s - (self._ledger.exposed_s - self._exposed_s)
