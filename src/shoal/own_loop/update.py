"""`Player`: one optimizer of a script's own loop, and the gradients of the parameters that it steps.

A script calls its optimizer's own `step()`. Two hooks make that the update of all ranks: the one before it lets ranks
agree on the gradient and vote, the one behind it brings every rank the parameters that others have updated. Where there
is nothing to update (before a step's last microbatch, or where something was not finite) the first hook takes the
gradients away, so that the optimizer changes nothing, and the second puts them back.

A loop with several optimizers, as for a GAN, has a player for each. A backward computes the gradients of its own
player's parameters alone: what the discriminator's weights would get from the generator's loss is not even computed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.assembly.run import Run
from shoal.data.sample import Batch
from shoal.engine.compute import Microbatch
from shoal.engine.rank_context import GlobalSum, RankContext
from shoal.engine.updates import AgreedUpdate, AtOnce, Outcome, Work
from shoal.errors import UserCodeError
from shoal.gradients.joint import JointGradients
from shoal.own_loop.objects import scaler_in


class Update(NamedTuple):
    """What an update did: the loss over the global batch, the 2-norm of its gradient, and whether both were finite. One
    that was not has changed nothing, and is false.
    """

    loss: float
    grad_norm: float
    committed: bool

    def __bool__(self) -> bool:
        return self.committed


class OpenStep:
    """One step while the loop is at it: which microbatch, and what its samples weigh."""

    def __init__(self, work: Work, batches: Sequence[Batch], *, scale: float) -> None:
        self.work, self.batches = work, batches
        self._scale, self._index = scale, -1
        self._microbatch: Microbatch | None = None

    @property
    def microbatch(self) -> Microbatch:
        assert self._microbatch is not None, "a microbatch has been entered"
        return self._microbatch

    @property
    def is_last(self) -> bool:
        return self._index == len(self.batches) - 1

    @property
    def place(self) -> str:
        """Which microbatch it is, in words."""
        return f"microbatch {self._index + 1} of {len(self.batches)}"

    def factor(self, *, weighed_by_loop: bool | None = None) -> float:
        """What a loss of weight 1 is multiplied by before the backward, as far as it is known."""
        return self._scale if weighed_by_loop else self._scale / self.work.tally.wait().denominator

    def enter(self, index: int, microbatch: Microbatch) -> None:
        self._index, self._microbatch = index, microbatch


def players_of(run: Run, sum_over_ranks: Callable[[float], float]) -> list[Player]:
    """A player for each optimizer that the script handed over. What `[optimizer]` says is not theirs: they clip when
    the script asks for it.
    """
    context, gradients, optimizers = run.step.context, run.generation.gradients, run.workload.optimizers
    if not isinstance(gradients, JointGradients):
        (own,) = optimizers
        policy = AtOnce(gradients, own.optimizer)
        return [Player(policy, own.optimizer, context, sum_over_ranks=sum_over_ranks)]
    trained = {each.holding.name: each.parameter for each in run.trained}
    return [
        Player(
            AtOnce(part, own.optimizer),
            own.optimizer,
            context,
            sum_over_ranks=sum_over_ranks,
            inputs=[trained[name] for name in own.names],
        )
        for own, part in zip(optimizers, gradients.parts, strict=True)
    ]


def joint_outcome(players: Sequence[Player]) -> Outcome:
    """What the updates of a step did together: the sum of the losses, the norm over all gradients."""
    done = [player.outcome for player in players if player.outcome is not None]
    if len(done) == 1:
        return done[0]
    return Outcome(
        sum(outcome.loss for outcome in done),
        math.hypot(*(outcome.norm for outcome in done)),
        all(outcome.committed for outcome in done),
        sum(outcome.update_s for outcome in done),
        scale=done[0].scale,
        keeps_buffers=all(outcome.keeps_buffers for outcome in done),
    )


class Player:
    """See above. `inputs` are the parameters that a backward differentiates by; None: all."""

    def __init__(
        self,
        policy: AtOnce,
        optimizer: torch.optim.Optimizer,
        context: RankContext,
        *,
        sum_over_ranks: Callable[[float], float],
        inputs: Sequence[Parameter] | None = None,
    ) -> None:
        self.policy, self.optimizer, self.inputs = policy, optimizer, inputs
        self.clip_norm: float | None = None
        self.outcome: Outcome | None = None
        self.lr = 0.0
        self._context, self._sum = context, sum_over_ranks
        self._loss = torch.zeros((), dtype=torch.float64, device=context.device)
        self._step: OpenStep | None = None
        self._agreed: AgreedUpdate | None = None
        self._withheld: list[tuple[Parameter, Tensor | None]] = []
        self._rates: list[float] = []
        self._backwards = self._expecting_more = self._stepped = False
        self._weighed_by_loop: bool | None = None
        self._own_weight, self._outcomes = 0.0, 0
        self._deferred: Tensor | None = None
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    @property
    def update(self) -> Update | None:
        """What the step's update did; None before it."""
        done = self.outcome
        return None if done is None else Update(done.loss, done.norm, done.committed)

    def begin(self, step: OpenStep) -> None:
        """Before the first microbatch of a step."""
        self.policy.begin(step.work)
        self._step, self._agreed, self.outcome, self.clip_norm = step, None, None, None
        self._loss, self._own_weight, self._weighed_by_loop = torch.zeros_like(self._loss), 0.0, None
        self._rates = []

    def enter(self) -> None:
        """Before every microbatch."""
        self._backwards = self._expecting_more = self._stepped = False
        self._deferred = None

    def leave(self) -> bool:
        """The loop asks for the next microbatch: whether this player has computed a gradient of this one."""
        step = self._opened()
        if self._expecting_more:
            raise UserCodeError(
                f"step {step.work.step}: backward(more=True) was the last for {step.place}; leave more=True out there"
            )
        if self._rates and self._rates != self._rates_now() and not step.is_last:
            raise UserCodeError(
                f"step {step.work.step}: the learning rate changed behind {step.place}, in the middle of an update; "
                "step the scheduler after an update only: if run.update: scheduler.step()"
            )
        return self._backwards

    def leave_step(self) -> bool:
        """The loop asks for the next step: whether this player has made its update. Raises `UserCodeError` where it has
        gradients and has not.
        """
        step, self._step = self._opened(), None
        if self._rates and self.outcome is None:
            raise UserCodeError(
                f"step {step.work.step}: step() was not called for {step.place}; call it after every backward() (it "
                "waits for the last microbatch by itself), or once behind each step of run.steps()"
            )
        return self.outcome is not None

    def weighed(self, loss: Tensor, weight: float | None, *, more: bool) -> Tensor | None:
        """The losses of this microbatch, each times what it counts; None where `more` follow."""
        step = self._opened()
        self._check_loss(loss)
        self._check_unscaled()
        if self._agreed is not None or self._stepped or (self._backwards and not self._expecting_more):
            raise UserCodeError(
                f"step {step.work.step}: backward() was called again for one batch, whose gradient has left already; "
                "pass more=True to every backward() of a batch but the last, and call step() after that"
            )
        if self._weighed_by_loop not in (None, weight is not None):
            raise UserCodeError("backward() has a weight for one batch and none for another; pass it always or never")
        self._weighed_by_loop = weight is not None
        batch = step.microbatch.batch
        counts = batch.weights.sum().item() if weight is None else float(weight) if batch.real_samples else 0.0
        if not self._expecting_more:
            self._own_weight += counts
        self._backwards, self._expecting_more = True, more
        self._rates = self._rates or self._rates_now()
        self._loss += loss.detach().double().reshape(()) * counts
        factor = step.factor(weighed_by_loop=self._weighed_by_loop)
        total = loss * (counts * factor)
        total = total if self._deferred is None else self._deferred + total
        self._deferred = total if more else None
        return None if more else total

    def clip(self, max_norm: float | None) -> None:
        """The largest norm of the step's gradient; None leaves it as it is. Raises `UserCodeError` where ranks have
        agreed on the gradient with another one.
        """
        if max_norm is None or max_norm == self.clip_norm:
            return
        if self._agreed is not None:
            raise UserCodeError(
                f"step {self._opened().work.step}: the gradient was clipped to {self.clip_norm} already, and cannot be "
                f"clipped to {max_norm} as well; clip once, before the optimizer's step"
            )
        self.clip_norm = max_norm

    def agree(self) -> AgreedUpdate | None:
        """After the last backward of a step: the gradient that all ranks agree on; None before that."""
        step = self._opened()
        if not self._backwards or self._expecting_more:
            raise UserCodeError(
                f"step {step.work.step}: step() was called before the last backward() of the batch; call backward() "
                "first, without more=True"
            )
        if self._agreed is None and step.is_last:
            denominator = self._denominator(step)
            loss = GlobalSum(self._context.lockstep)
            loss.start(self._loss)
            self.lr = self._rates_now()[0]
            work = step.work
            own = Work(work.step, work.batches, None, work.tally, loss, work.on_gradients)
            self._agreed = self.policy.agree(self._context, own, denominator=denominator, clip_norm=self.clip_norm)
        return self._agreed

    def close(self) -> None:
        """Gives the optimizer back as it was."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_unscaled()
        if len(args) > 1 or any(value is not None for value in kwargs.values()):
            raise UserCodeError("optimizer.step() was given a closure; call it without, after the backward")
        step = self._opened()
        if self._stepped:
            raise UserCodeError(f"step {step.work.step}: step() was called twice for one batch")
        agreed = self.agree()
        self._stepped = True
        if agreed is None or not agreed.committed:
            self._withheld = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
            for parameter, _ in self._withheld:
                parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld = []
        if self._agreed is not None:
            self.outcome = self.policy.conclude(self._context, self._agreed)
            self._outcomes += 1

    def _opened(self) -> OpenStep:
        if self._step is None:
            raise UserCodeError("there is no batch: call backward() and step() inside the loop over batches()")
        return self._step

    def _rates_now(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _denominator(self, step: OpenStep) -> float | None:
        """The weight of the global batch, if the loop weighs; None: losses were divided by it already."""
        if not self._weighed_by_loop:
            return None
        total = self._sum(self._own_weight)
        if total <= 0:
            raise UserCodeError(f"step {step.work.step}: all weights of the global batch are 0; give one sample weight")
        return total

    def _check_unscaled(self) -> None:
        """In the first step. Raises `UserCodeError` where the script, or who calls the optimizer, scales losses."""
        if self._outcomes or scaler_in(sys._getframe()) is None:
            return
        raise UserCodeError(
            "the script scales its loss by a GradScaler, which would skip updates on one rank and not on the others: "
            'set precision.kind = "float16", which scales for all ranks, and make it GradScaler(enabled=False)'
        )

    @staticmethod
    def _check_loss(loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            return
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
        what = "without a gradient" if isinstance(loss, Tensor) and loss.numel() == 1 else what
        raise UserCodeError(f"the loss is {what}; backward() takes a scalar tensor that depends on the model")
