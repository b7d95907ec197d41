"""One step, as the data sees it: count, forward, backward, agree, vote, commit or skip."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.comm.ledger import Entry, Ledger
from shoal.data.sample import Batch, map_tree
from shoal.engine.buffers import BufferGuard
from shoal.engine.loss import Loss, call_model, weighted_sum
from shoal.engine.precision import LossScaler, Precision
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
    """What a step did. `norm` and `loss` are those of the whole global batch; `scale` is the loss scale it used."""

    loss: float
    norm: float
    scale: float
    committed: bool
    tally: Tally
    times: StepTimes
    bytes_sent: int


class TrainStep:
    """Computes one update of `model` from the microbatches of this rank."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        optimizer: torch.optim.Optimizer,
        sync: Sync,
        group: Collective,
        ledger: Ledger,
        precision: Precision,
        scaler: LossScaler,
        randomness: Randomness,
        device: torch.device,
        clip_norm: float | None,
    ) -> None:
        self.model, self.loss, self.optimizer, self.sync = model, loss, optimizer, sync
        self.group, self.ledger, self.device, self.clip_norm = group, ledger, device, clip_norm
        self.precision, self.scaler, self.randomness = precision, scaler, randomness
        self.statistics, self.buffers = StatisticsSync(model, group), BufferGuard(model, group)

    def __call__(self, step: int, microbatches: Sequence[Batch], *, lr: float, stop: bool = False) -> StepResult:
        """Raises `CollectiveError` where a rank is lost; a non-finite loss or gradient makes `committed` false."""
        begin_s = time.perf_counter()
        self.ledger.take()  # what an evaluation has sent belongs to no step
        self.model.train()
        self.buffers.start()
        self.randomness.step(step)
        self.sync.start()
        tally = PendingTally(microbatches, self.group, stop=stop, device=self.device)
        counted, loss = self._forward_backward(microbatches, tally)
        backward_s = time.perf_counter()
        waited_s = self.ledger.total().exposed_s
        norm = float(self.sync.gradients()) / self.scaler.scale
        global_loss = loss() / counted.denominator
        scale, committed = self.scaler.scale, self._commit_or_skip(norm, global_loss, lr)
        wire = sum(self.ledger.take().values(), start=Entry())
        in_backward_s, after_s = backward_s - begin_s, time.perf_counter() - backward_s
        waited_after_s = wire.exposed_s - waited_s
        times = StepTimes(in_backward_s - waited_s, wire.exposed_s, after_s - waited_after_s)
        return StepResult(global_loss, norm, scale, committed, counted, times, wire.bytes_sent)

    def _forward_backward(self, microbatches: Sequence[Batch], tally: PendingTally):
        """Every microbatch forward and backward. Returns the tally, and a function that gives the global loss sum."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        counted, handle = None, None
        for index, batch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            loss_sum = self._forward(batch)
            total += loss_sum.detach()
            if counted is None:
                counted = tally.wait()
            if last and self.group.size > 1:
                handle = self.group.all_reduce(total)
            with self.sync.backward(last=last):
                (loss_sum * (self.scaler.scale / counted.denominator)).backward()

        def global_sum() -> float:
            if handle is not None:
                handle.wait()
            return float(total)

        assert counted is not None, "a step has at least one microbatch"
        return counted, global_sum

    def _forward(self, batch: Batch) -> Tensor:
        batch = on_device(batch, self.device, self.precision.parameters)
        self.randomness.microbatch(batch.positions)
        with self.precision.autocast(self.device):
            outputs = call_model(self.model, batch.inputs)
            losses = self.loss(outputs, batch.targets)
        return weighted_sum(losses, batch.weights)

    def _commit_or_skip(self, norm: float, loss: float, lr: float) -> bool:
        """The vote: norm and loss are sums over all ranks, so what is not finite anywhere shows on every rank."""
        finite = math.isfinite(norm) and math.isfinite(loss)
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


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on `device`, its floating inputs and targets in `dtype` (weights stay as they are)."""
    if device.type != "cpu":
        batch = batch.to(device, non_blocking=True)
    cast = lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf  # noqa: E731
    inputs, targets = map_tree(cast, batch.inputs), map_tree(cast, batch.targets)
    return Batch(inputs, targets, weights=batch.weights, positions=batch.positions)
