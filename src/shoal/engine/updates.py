"""When a gradient becomes an update. A policy runs the forward and backward of a step, because what it needs from them
differs, and makes the update.

    AtOnce         all gradients agree, one vote, one update
    ByBucket       each bucket's parameters are updated when their sums are there, in the next forward
    ByMicrobatch   PipeDream: every stage updates after each microbatch, from weights some updates old
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.data.sample import Batch
from shoal.engine.forward_backward import PipelinedForwardBackward
from shoal.engine.rank_context import GlobalSum, RankContext, UpdateClock
from shoal.engine.tally import DeviceVote, NoiseMeter, NoiseReading, PendingTally, Tally
from shoal.engine.transforms import AgreedGradient, ClipByGlobalNorm, Transform, clip_by_global_norm
from shoal.errors import ConfigError, Diverged
from shoal.gradients.gradients import Gradients
from shoal.gradients.priority import PriorityGradients
from shoal.models.batch_norm import StepStatistics
from shoal.optim.build import part_of, set_rate
from shoal.optim.fused import FusedOptimizer
from shoal.optim.layer_statistics import SeesLayers
from shoal.state import works_in_streams

OnGradients = Callable[[float], None]
"""Called with the 2-norm of the agreed gradient of the whole model."""
OnMicrobatch = Callable[[int], None]
"""Called with the number of a microbatch when its gradient is agreed, before its update."""


@dataclass(frozen=True)
class Work:
    """What a step gives its policy."""

    step: int
    batches: Sequence[Batch]
    lr: float | None
    tally: PendingTally
    loss: GlobalSum
    on_gradients: OnGradients | None = None
    on_microbatch: OnMicrobatch | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a step. `loss` and `norm` are those of the global batch, `scale` the loss scale that was used.

    `committed`: it was finite. `keeps_buffers`: what the forward changed beside the parameters stays.
    """

    loss: float
    norm: float
    committed: bool
    update_s: float
    scale: float = 1.0
    keeps_buffers: bool = True
    noise: NoiseReading | None = None


@dataclass(frozen=True)
class AgreedUpdate:
    """An update that ranks have agreed on and the optimizer has not made yet. `committed`: it is finite, and shall be.

    `loss` and `norm` are those of the global batch, `scale` the loss scale; `clock` runs since the end of the backward.
    """

    loss: float
    norm: float
    committed: bool
    scale: float
    noise: NoiseReading | None
    clock: UpdateClock


class UpdatePolicy(Protocol):
    """Takes a step's samples to new weights. `overlaps_steps`: what is sent between two steps belongs to the second."""

    overlaps_steps: bool

    @property
    def gradients(self) -> Gradients: ...

    def __call__(self, context: RankContext, work: Work) -> Outcome: ...


class LeavesOut(Protocol):
    """What leaves a part of the model out of a step: masks, or freezing. All ranks call each method together."""

    def begin(self, step: int) -> bool:
        """Before the forward of `step`. Whether weights may have changed, which then are to be gathered."""
        ...

    def explore(self, step: int, again: Callable[[], object]) -> None:
        """After the backward, if the agreed gradient is finite. `again` computes it at the weights as they are."""
        ...

    def agreed(self, step: int, *, scale: float = 1.0) -> float | None:
        """After that, if the agreed gradient is finite: leaves some of it out. The 2-norm of what is left, or
        None where that is as before. The gradient is still to be divided by `scale`, and so is the norm.
        """
        ...

    def updated(self, step: int) -> None:
        """After the update."""
        ...

    def skipped(self) -> bool:
        """Instead of that, in a step without an update: weights are again those of an evaluation. Whether any may have
        changed, which then are to be gathered.
        """
        ...


class AtOnce:
    """One update, from the whole gradient. `transforms` are applied to it in order; `noise` measures it.

    The vote: norm and loss are sums over all ranks in lock-step, so what is not finite anywhere shows on every rank.

    `votes_ahead`: the device votes, and the host launches the update before it knows the outcome (`DeviceVote`). Else
    the device would stand still from the end of a backward until the host has read the norm. None: on GPUs. `seen`: a
    script reads the gradient before the optimizer does, so that nothing of it is left to the optimizer's kernel.
    `leaves_out` say what of the model a step does not train.
    """

    overlaps_steps = False

    def __init__(
        self,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        *,
        transforms: Sequence[Transform] = (),
        noise: NoiseMeter | None = None,
        votes_ahead: bool | None = None,
        seen: bool = False,
        leaves_out: Sequence[LeavesOut] = (),
    ) -> None:
        self.gradients, self._leaves_out = gradients, leaves_out
        self._optimizer, self._transforms, self._noise = optimizer, transforms, noise
        fused = optimizer if isinstance(optimizer, FusedOptimizer) and optimizer.takes_scale else None
        self._fused = None if seen else fused
        self._votes_ahead = votes_ahead
        self._sees_layers = optimizer if isinstance(optimizer, SeesLayers) else None

    def __call__(self, context: RankContext, work: Work) -> Outcome:
        self.begin(work)
        scale = context.scaler.scale
        context.forward_backward(
            work.batches,
            gradients=self.gradients,
            factor=lambda: scale / work.tally.wait().denominator,
            on_loss=work.loss.start,
        )
        return self.update(context, work)

    def begin(self, work: Work) -> None:
        """Before the first backward of an update."""
        if self._noise is not None:
            self._noise.start(work.step)
        if self._sees_layers is not None:
            self._sees_layers.begin(work.step)
        if self._leaves_out:
            self.gradients.settle()  # masks are put on what a script has written, too
        changed = [each.begin(work.step) for each in self._leaves_out]
        if any(changed):
            self.gradients.gather()
        self.gradients.start()

    def update(self, context: RankContext, work: Work) -> Outcome:
        """After the last backward: the vote and the update."""
        if (outcome := self._ahead(context, work)) is not None:
            return outcome
        agreed = self.agree(context, work)
        if agreed.committed:
            context.agree_on_buffers(work.tally.wait())
            set_rate(self._optimizer, work.lr)
            self._optimizer.step()
            for each in self._leaves_out:
                each.updated(work.step)
        return self.conclude(context, agreed)

    def agree(
        self,
        context: RankContext,
        work: Work,
        *,
        denominator: float | None = None,
        terms: float | None = None,
        clip_norm: float | None = None,
    ) -> AgreedUpdate:
        """The first half of an update: the vote, and the gradient as the optimizer is to see it.

        `denominator`: by which the gradient is still to be divided, and the loss; None: it was, by that of the tally.
        `terms`: of how many losses it is the sum or mean; None: of as many as the tally counts.
        `clip_norm`: the largest 2-norm of this update, beside the policy's own transforms.
        """
        tally, clock = work.tally.wait(), UpdateClock(context)
        loss_scale = context.scaler.scale
        scale = loss_scale * (1.0 if denominator is None else denominator)
        norm, loss = work.loss.wait_beside(self.gradients.reduce())
        norm, loss = norm / scale, loss / (tally.denominator if denominator is None else denominator)
        finite = math.isfinite(norm) and math.isfinite(loss)
        for each in self._leaves_out if finite else ():
            each.explore(work.step, lambda: self._repeat(context, work))
            left = each.agreed(work.step, scale=scale)
            norm = norm if left is None else left / scale
        if work.on_gradients is not None:
            work.on_gradients(norm)
        noise = self._measure(work.batches, tally, norm, scale) if finite else None
        if finite and self._sees_layers is not None:
            factor = loss_scale / tally.denominator if denominator is None else loss_scale
            self._sees_layers.agree(scale=factor, terms=tally.denominator if terms is None else terms)
        if finite:
            gradient = AgreedGradient(self.gradients, norm, factor=1.0 / scale, step=work.step)
            more = () if clip_norm is None else (clip_by_global_norm(clip_norm),)
            for transform in (*self._transforms, *more):
                transform(gradient)
            self._hand_over(gradient)
        return AgreedUpdate(loss, norm, finite, loss_scale, noise, clock)

    def _repeat(self, context: RankContext, work: Work) -> None:
        """The gradient of the same samples, at the weights as they are. Raises as `check_repeatable`."""
        check_repeatable(context)
        self.gradients.gather()
        self.gradients.start()
        total, scale = GlobalSum(context.lockstep), context.scaler.scale
        context.forward_backward(
            work.batches,
            gradients=self.gradients,
            factor=lambda: scale / work.tally.wait().denominator,
            on_loss=total.start,
        )
        self.gradients.reduce()
        total.wait()

    def _ahead(self, context: RankContext, work: Work) -> Outcome | None:
        """The vote and the update, launched before the outcome is known; None where that cannot be."""
        wanted = works_in_streams(context.device) if self._votes_ahead is None else self._votes_ahead
        limits = [transform.limit for transform in self._transforms if isinstance(transform, ClipByGlobalNorm)]
        measured = self._noise is not None or work.on_gradients is not None or len(limits) < len(self._transforms)
        if not wanted or measured or self._leaves_out or self._fused is None or not self._fused.takes_vote:
            return None
        tally, clock, scale = work.tally.wait(), UpdateClock(context), context.scaler.scale
        norm = self.gradients.reduce()
        vote = DeviceVote(norm if scale == 1.0 else norm / scale, work.loss.tensor() / tally.denominator)
        context.agree_on_buffers(tally)
        set_rate(self._fused, work.lr)
        self._fused.grad_scale, self._fused.found_inf = vote.divisor(scale, limits), vote.found_inf
        self._fused.step()
        length, loss = vote.read()
        return self.conclude(context, AgreedUpdate(loss, length, vote.finite(length, loss), scale, None, clock))

    def _hand_over(self, gradient: AgreedGradient) -> None:
        """What is still to be multiplied by is the kernel's, where it takes it."""
        if self._fused is None:
            gradient.apply()
        elif gradient.factor != 1.0:
            device = self._fused.param_groups[0]["params"][0].device
            self._fused.grad_scale = torch.full((), 1 / gradient.factor, device=device)

    def conclude(self, context: RankContext, agreed: AgreedUpdate) -> Outcome:
        """The second half, after the optimizer's step if `agreed.committed`, else without one."""
        undone = [] if agreed.committed else [each.skipped() for each in self._leaves_out]
        if agreed.committed or any(undone):
            self.gradients.gather()
        context.scaler.update(finite=agreed.committed)
        return Outcome(
            agreed.loss,
            agreed.norm,
            agreed.committed,
            agreed.clock.seconds(),
            scale=agreed.scale,
            keeps_buffers=agreed.committed,
            noise=agreed.noise,
        )

    def _measure(self, batches: Sequence[Batch], tally: Tally, norm: float, scale: float) -> NoiseReading | None:
        """Norm and loss are the same on every rank, so all of them measure or none."""
        if self._noise is None:
            return None
        return self._noise.reading(batches, tally, norm=norm, scale=scale)


def check_repeatable(context: RankContext) -> None:
    """Raises `ConfigError` for a model that counts the batches it has seen."""
    counting = [name for name, module in context.model.named_modules() if isinstance(module, StepStatistics)]
    if counting:
        raise ConfigError(
            f"{counting[0]} takes statistics of every forward, and this optimizer.kind or sparsity.kind makes several "
            "of the same samples: use a model without batch norms, or another kind"
        )


class ByBucket:
    """Updates of the parameters of each bucket when their sums are there, in the next forward.

        step n      forward (updates of n - 1, each before its module) | backward | loss
        step n + 1  forward (updates of n, ...)                        | ...

    It computes what `AtOnce` does, without clipping and loss scale. What is known only when all sums are there comes
    late: the norm is that of the step before, but for the first steps and where somebody asks for it. A loss that is
    not finite is known before any update, and such a step is skipped; a gradient that is not finite, of a loss that is,
    shows when a part of the update is made already, and ends the run.
    """

    overlaps_steps = True

    def __init__(self, gradients: PriorityGradients, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = gradients
        self._parts = [part_of(optimizer, parameters) for parameters in gradients.parts]
        self._step, self._update_s = 0, 0.0
        self._lr: float | None = None
        gradients.on_arrival(self._update)

    def __call__(self, context: RankContext, work: Work) -> Outcome:
        """Raises `Diverged` if the gradient of the step before was not finite, though its loss was."""
        self._update_s = 0.0
        self.gradients.start()
        context.forward_backward(
            work.batches,
            gradients=self.gradients,
            factor=lambda: 1.0 / work.tally.wait().denominator,
            on_loss=work.loss.start,
        )
        loss = work.loss.wait() / work.tally.wait().denominator
        finite = math.isfinite(loss)
        self._step, self._lr = work.step, work.lr
        self.gradients.release(commit=finite)
        waits = self.gradients.rehearses or work.on_gradients is not None
        norm = float(self.gradients.reduce() if waits else self.gradients.norm)
        if work.on_gradients is not None:
            work.on_gradients(norm)
        return Outcome(loss, norm, finite, self._update_s, keeps_buffers=finite)

    def _update(self, part: int, norm: Tensor) -> None:
        """The sums of some parameters are there."""
        if not math.isfinite(norm):
            raise Diverged(
                f"step {self._step} had a finite loss and a gradient that is not finite, of which a part has been "
                'applied already, because gradients.schedule = "priority": go on from the newest checkpoint with a '
                'smaller optimizer.lr, or with gradients.schedule = "order", which skips such steps'
            )
        begin_s = time.perf_counter()
        set_rate(self._parts[part], self._lr)
        self._parts[part].step()
        self._update_s += time.perf_counter() - begin_s


class ByMicrobatch:
    """PipeDream (SOSP 2019, section 3.3): an update after each microbatch, from gradients of weights some updates old.

    With S stages, M microbatches and updates u of stage s's optimizer:

        w_s(j + 1) = w_s(j) - u(g_s(j)),    g(j) = gradient of microbatch j at w_0(j - S + 1), ..., w_{S-1}(j)

    where versions before the step's first are the first. A step is one global batch: the pipeline fills at its start
    and drains at its end, so that checkpoints, evaluations and the learning rate see one version of the weights.

    - The loss of a microbatch is divided by its own weight, summed over all ranks that see parts of it; one that weighs
      nothing (padding) updates nothing.
    - Stages are never at the same microbatch, so there is no norm of the whole gradient to clip by: each stage is
      clipped by the norm of its own.
    - For the same reason nobody can vote: a stage leaves out an update whose gradient is not finite. The step then
      counts as skipped, though its other updates were made.

    `gradients` sum and measure those of this rank's stage alone. `forward_backward` is that of the rank's context.
    """

    overlaps_steps = False

    def __init__(
        self,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        *,
        forward_backward: PipelinedForwardBackward,
        clip_norm: float | None,
    ) -> None:
        self.gradients, self.forward_backward = gradients, forward_backward
        self._optimizer, self._clip_norm = optimizer, clip_norm
        self._squares: list[float] = []
        self._update_s = 0.0

    def __call__(self, context: RankContext, work: Work) -> Outcome:
        """`work.on_gradients` is called after the last update, with the root mean square of the updates' norms."""
        self.gradients.start()
        self._squares, self._update_s = [], 0.0
        set_rate(self._optimizer, work.lr)
        microbatches = self.forward_backward.arrange(work.batches)
        weights = _weights(microbatches, context)
        with self.gradients.schedule():
            own_loss = self.forward_backward.asynchronous(
                microbatches,
                factors=[1 / weight if weight else 0.0 for weight in weights],
                update=lambda stage, number: self._after_microbatch(number, weights[number], context, work),
            )
        tally, norm = work.tally.wait(), self._norm(self.forward_backward.group, context.device)
        work.loss.start(own_loss)
        loss = work.loss.wait() / tally.denominator
        if work.on_gradients is not None:
            work.on_gradients(norm)
        finite = math.isfinite(norm) and math.isfinite(loss)
        return Outcome(loss, norm, finite, self._update_s)

    def _after_microbatch(self, number: int, weight: float, context: RankContext, work: Work) -> None:
        clock = UpdateClock(context)
        norm = float(self.gradients.reduce())
        if weight:
            self._squares.append(norm**2)
            if work.on_microbatch is not None:
                work.on_microbatch(number)
            if math.isfinite(norm):
                self._update(norm)
        self.gradients.start()
        self._update_s += clock.seconds()

    def _update(self, norm: float) -> None:
        if self._clip_norm is not None and norm > self._clip_norm:
            self.gradients.scale(self._clip_norm / norm)
        self._optimizer.step()
        self.gradients.gather()

    def _norm(self, pipeline: Collective, device: torch.device) -> float:
        """sqrt(mean over the updates of the squared norm of all stages together)."""
        total: Tensor = torch.tensor(sum(self._squares), dtype=torch.float64, device=device)
        pipeline.all_reduce(total).wait()
        return math.sqrt(float(total) / max(1, len(self._squares)))


def _weights(microbatches: Sequence[Batch], context: RankContext) -> list[float]:
    """What each microbatch weighs on all ranks together."""
    own = [batch.weight if context.counts else 0.0 for batch in microbatches]
    weights = torch.tensor(own, dtype=torch.float64, device=context.device)
    context.lockstep.all_reduce(weights).wait()
    return weights.tolist()
