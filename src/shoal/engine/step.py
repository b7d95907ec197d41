"""One step, as the data sees it: count, forward and backward, agree, vote, commit or skip."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from shoal.comm.collective import Collective
from shoal.comm.link_watch import LinkWatch
from shoal.data.sample import Batch
from shoal.engine.compute import Compute
from shoal.engine.precision import LossScaler, Precision
from shoal.engine.rank_context import GlobalSum, RankContext
from shoal.engine.tally import StepResult, StepTimes, Tally
from shoal.engine.updates import OnGradients, OnMicrobatch, Outcome, UpdatePolicy, Work
from shoal.gradients.gradients import Gradients
from shoal.sync.strategy import Agreement, Taken


class TrainStep:
    """Computes one update from this rank's samples of a step. When and how it is made is `policy`'s; `agreement` is
    what follows between replicas.
    """

    def __init__(self, context: RankContext, policy: UpdatePolicy, agreement: Agreement) -> None:
        self.context, self.policy, self.agreement = context, policy, agreement
        self.counting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around what a step computes: what a simulated device counts."""
        self.links: LinkWatch | None = None
        """What chooses anew when the links of ranks in lock-step change; None: nothing does."""

    @property
    def lockstep(self) -> Collective:
        """The ranks that take every step together."""
        return self.context.lockstep

    @property
    def compute(self) -> Compute:
        """How this rank calls the model and the loss."""
        return self.context.forward_backward.compute

    @property
    def scale(self) -> float:
        """What losses are multiplied by before the backward."""
        return self.context.scaler.scale

    def under(self, precision: Precision, scaler: LossScaler) -> TrainStep:
        """The same step at another precision of the forward, with another scale of the loss."""
        context = self.context
        compute = replace(context.forward_backward.compute, precision=precision)
        forward_backward = replace(context.forward_backward, compute=compute)  # type: ignore[type-var]
        context = replace(context, forward_backward=forward_backward, scaler=scaler)
        return self._like(context, self.policy)

    def by(self, policy: UpdatePolicy) -> TrainStep:
        """The same step, whose updates `policy` makes."""
        return self._like(self.context, policy)

    def _like(self, context: RankContext, policy: UpdatePolicy) -> TrainStep:
        step = TrainStep(context, policy, self.agreement)
        step.counting, step.links = self.counting, self.links
        return step

    def __call__(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        lr: float | None,
        samples: int | None = None,
        stop: bool = False,
        on_gradients: OnGradients | None = None,
        on_microbatch: OnMicrobatch | None = None,
    ) -> StepResult:
        """Raises `CollectiveError` if a rank is lost. A loss or gradient that is not finite makes `committed` false.

        `samples`: those of all ranks; None: of a whole step. `stop`: this rank was told to stop; the result says
        whether any rank was. `on_gradients` is called with the norm of the whole gradient, and where the policy allows
        it before the update; `on_microbatch` by PipeDream with the number of each microbatch, before its update.
        """
        if self.agreement.skips_step:
            return self._skip(step, stop=stop)
        with self.counting():
            work = self.begin(
                step,
                batches,
                lr=lr,
                samples=samples,
                stop=stop,
                on_gradients=on_gradients,
                on_microbatch=on_microbatch,
            )
            return self.end(work, self.policy(self.context, work))

    def begin(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        lr: float | None,
        samples: int | None = None,
        stop: bool = False,
        on_gradients: OnGradients | None = None,
        on_microbatch: OnMicrobatch | None = None,
    ) -> Work:
        """The first half of a step: what its policy gets. `lr` None: the optimizer's groups have their own rates."""
        context = self.context
        if not self.policy.overlaps_steps:
            context.ledger.take()  # what an evaluation has sent belongs to no step
        if self.links is not None:
            self.links.begin()
        self.agreement.before_step(sum(batch.weight for batch in batches))
        context.begin(step, samples=samples)
        tally = context.tally(batches, stop=stop)
        return Work(step, batches, lr, tally, GlobalSum(context.lockstep), on_gradients, on_microbatch)

    def end(self, work: Work, outcome: Outcome) -> StepResult:
        """The second half: agreement between replicas, and an account of the step."""
        context, counted = self.context, work.tally.wait()
        context.finish(counted, committed=outcome.keeps_buffers)
        taken = Taken(counted.stop, counted.tokens, outcome.loss, work.lr, counted.denominator)
        agreed = self.agreement.after_update(work.step, taken)
        if self.links is not None:
            self.links.end()
        return context.result(
            loss=outcome.loss,
            norm=outcome.norm,
            scale=outcome.scale,
            committed=outcome.committed,
            tally=counted,
            agreed=agreed,
            update_s=outcome.update_s,
            noise=outcome.noise,
        )

    def _skip(self, step: int, *, stop: bool) -> StepResult:
        """The step was made by other replicas: this one goes on with the next."""
        self.agreement.before_step(0.0)
        agreed = self.agreement.after_update(step, Taken(stop, 0, math.nan, None))
        nothing = Tally(denominator=0.0, samples=0, tokens=0, stop=stop)
        sent = self.context.ledger.take()
        return StepResult(
            loss=math.nan,
            norm=math.nan,
            scale=self.context.scaler.scale,
            committed=True,
            tally=nothing,
            times=StepTimes(0.0, 0.0, 0.0),
            bytes_sent=sum(entry.bytes_sent for entry in sent.values()),
            agreed=agreed,
            wire=sent,
            skipped=True,
        )

    @property
    def gradients(self) -> Gradients:
        """Those that the policy reduces."""
        return self.policy.gradients

    def settle(self) -> None:
        """Between two steps: returns when every update is made."""
        self.policy.gradients.settle()
