"""One step, as the data sees it: count, forward, backward, agree, vote, commit or skip."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.ledger import Entry, Ledger
from shoal.data.sample import Batch
from shoal.engine.buffers import BufferGuard
from shoal.engine.noise import NoiseMeter, NoiseReading
from shoal.engine.passes import Passes
from shoal.engine.precision import LossScaler
from shoal.engine.randomness import Randomness
from shoal.engine.statistics import StatisticsSync
from shoal.engine.tally import PendingTally, Tally
from shoal.optim.build import set_rate
from shoal.sync.strategy import Sync


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, without overlap: they add up to it.

    `sync_exposed_s` is what the caller stood still for the wire, wherever that was; `optimizer_s` holds norm and clip.
    """

    forward_backward_s: float
    sync_exposed_s: float
    optimizer_s: float


@dataclass(frozen=True)
class StepResult:
    """What a step did. `norm` and `loss` are those of the whole global batch; `scale` is the loss scale it used.

    `noise` is None where it was not due, or the step not finite. `wire` is what this rank sent, by operation.
    """

    loss: float
    norm: float
    scale: float
    committed: bool
    tally: Tally
    times: StepTimes
    bytes_sent: int
    noise: NoiseReading | None = None
    wire: Mapping[str, Entry] = field(default_factory=dict)


class TrainStep:
    """Computes one update from this rank's samples.

    `group` are the ranks that vote, all that train in lock-step; `twins` those that hold the same layers and see other
    samples, or other tokens of them; `counts` says whether this rank's samples are counted, or those of another rank
    that sees the same.
    """

    def __init__(
        self,
        passes: Passes,
        *,
        optimizer: torch.optim.Optimizer,
        sync: Sync,
        group: Collective,
        twins: Collective,
        ledger: Ledger,
        scaler: LossScaler,
        randomness: Randomness,
        device: torch.device,
        clip_norm: float | None,
        counts: bool = True,
        noise: NoiseMeter | None = None,
    ) -> None:
        self.noise = noise
        self.passes, self.model, self.optimizer, self.sync = passes, passes.compute.model, optimizer, sync
        self.group, self.ledger, self.device, self.clip_norm = group, ledger, device, clip_norm
        self.scaler, self.randomness, self.counts = scaler, randomness, counts
        self.statistics, self.buffers = StatisticsSync(self.model, twins), BufferGuard(self.model, twins)

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
        begin_s = time.perf_counter()
        self.ledger.take()  # what an evaluation has sent belongs to no step
        self.model.train()
        self.buffers.start()
        self.randomness.step(step)
        if self.noise is not None:
            self.noise.start(step)
        self.sync.start()
        tally = PendingTally(batches if self.counts else (), self.group, stop=stop, device=self.device)
        loss = GlobalSum(self.group)
        self.passes.train(batches, sync=self.sync, factor=lambda: self._factor_of(tally), known=loss.start)
        counted, backward_s = tally.wait(), time.perf_counter()
        waited_s = self.ledger.total().exposed_s
        norm = float(self.sync.gradients()) / self.scaler.scale
        if look is not None:
            look(norm)
        global_loss = loss.wait() / counted.denominator
        noise = self._noise(batches, counted, norm, global_loss)
        scale, committed = self.scaler.scale, self._commit_or_skip(norm, global_loss, lr)
        taken = self.ledger.take()
        wire = sum(taken.values(), start=Entry())
        in_backward_s, after_s = backward_s - begin_s, time.perf_counter() - backward_s
        waited_after_s = wire.exposed_s - waited_s
        times = StepTimes(in_backward_s - waited_s, wire.exposed_s, after_s - waited_after_s)
        return StepResult(global_loss, norm, scale, committed, counted, times, wire.bytes_sent, noise, taken)

    def _noise(self, batches: Sequence[Batch], tally: Tally, norm: float, loss: float) -> NoiseReading | None:
        """Norm and loss are the same on every rank, so all of them measure or none."""
        if self.noise is None or not _finite(norm, loss):
            return None
        return self.noise.reading(batches, tally, norm=norm, scale=self.scaler.scale)

    def _factor_of(self, tally: PendingTally) -> float:
        """What the sum of losses is multiplied by before the backward."""
        return self.scaler.scale / tally.wait().denominator

    def _commit_or_skip(self, norm: float, loss: float, lr: float) -> bool:
        """The vote: norm and loss are sums over all ranks, so what is not finite anywhere shows on every rank."""
        finite = _finite(norm, loss)
        if finite:
            factor = self._factor(norm)
            if factor != 1.0:
                self.sync.scale(factor)
            set_rate(self.optimizer, lr)
            self.optimizer.step()
            self.sync.parameters()
        self.statistics.finish(committed=finite)
        self.buffers.finish(committed=finite)
        self.scaler.update(finite=finite)
        return finite

    def _factor(self, norm: float) -> float:
        """What the gradient is multiplied by: one over the loss scale, and the clip to `clip_norm`."""
        clip = 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm
        return clip / self.scaler.scale


def _finite(norm: float, loss: float) -> bool:
    return math.isfinite(norm) and math.isfinite(loss)


class GlobalSum:
    """A sum over the ranks of `group`, under way behind the backward."""

    def __init__(self, group: Collective) -> None:
        self._group, self._total, self._handle = group, torch.zeros(()), None

    def start(self, own: Tensor) -> None:
        """This rank's part, which must not change any more."""
        self._total = own
        self._handle = self._group.all_reduce(own) if self._group.size > 1 else None

    def wait(self) -> float:
        """The sum."""
        if self._handle is not None:
            self._handle.wait()
        return float(self._total)
