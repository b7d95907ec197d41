"""`Player`: one optimizer of a script's own loop, and the gradients of the parameters that it steps.

When the last backward of a step is over, ranks agree on the gradient and vote. From then on `.grad` is the gradient of
the global batch, as it is in a plain loop on one process: a script may clip it, scale it, log it or take it away before
the optimizer's step. Before that, between two microbatches, `.grad` is a placeholder on which such code has no effect,
so that it may stand in the loop's body, and `zero_grad` has nothing to wipe out. A parameter that no rank has used in
the step has no gradient, and the optimizer passes it by.

A script calls its optimizer's own `step()`. Two hooks make that the update of all ranks: the one behind it brings every
rank the parameters that others have updated. Where there is nothing to update (before a step's last microbatch, or
where something was not finite) the one before it takes the gradients away, so that the optimizer changes nothing, and
the second puts them back. Of PyTorch's Adam it takes the groups' parameters instead, which is less to take; and where
the first hook has made the update itself (`DirectAdam`).

A loop with several optimizers, as for a GAN, has a player for each. A backward that names one computes the gradients of
its parameters alone: what the discriminator's weights would get from the generator's loss is not even computed. One
that names none is for all of them.

A step of several microbatches is right where each gradient is that of one set of weights. So all backwards come before
all updates; or the loop takes the microbatches once for each optimizer, whose update is made before the next pass. A
gradient that goes on behind another optimizer's update would be of two sets of weights, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.assembly.trainable import FrozenParameters, GradientHooks, TrainedSet
from shoal.engine.rank_context import RankContext
from shoal.engine.updates import AgreedUpdate, AtOnce, Outcome, Work
from shoal.errors import UserCodeError
from shoal.gradients.gradients import VisibleGradients, clip_factor
from shoal.gradients.partial_gradient import placeholder
from shoal.gradients.script_writes import SeenGradients
from shoal.optim.adam_kernel import DirectAdam
from shoal.optim.parts import SeesParts
from shoal.own_loop.declaration import (
    Declaration,
    check_unchanged,
    named,
    numbers_of,
    scheduled_in,
    used_anywhere,
)
from shoal.own_loop.losses import NO_WEIGHT, LossKind, check_loss
from shoal.own_loop.objects import scaler_in
from shoal.own_loop.open_step import OpenStep, Update, counted, counts_of
from shoal.own_loop.shown_optimizer import EmptyStep, ShownGroups, StepHooks
from shoal.state import Owned

OnUpdate = Callable[[int, Sequence[Owned]], None]
"""Called with the number of the step, and with what this rank's optimizer is about to update."""


class Player:
    """See above. `trained` are the model's parameters that the optimizer trains, by name; `inputs` are the same, for a
    backward of this player alone. `shown` are the optimizer's groups. The optimizer `moves_alone` if a step without a
    gradient changes parameters or state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: VisibleGradients,
        context: RankContext,
        trained: Mapping[str, Parameter],
        *,
        shown: ShownGroups,
        trained_set: TrainedSet,
        sum_over_ranks: Callable[[float], float],
        on_update: OnUpdate | None = None,
        moves_alone: bool = False,
    ) -> None:
        self.optimizer, self.gradients, self.policy = optimizer, gradients, AtOnce(gradients, optimizer, seen=True)
        self.inputs = list(trained.values())
        self.outcome: Outcome | None = None
        self.lr = 0.0
        self._context, self._sum, self._on_update = context, sum_over_ranks, on_update
        self._loss: float | Tensor = 0.0
        self._step: OpenStep | None = None
        self._agreed: AgreedUpdate | None = None
        self._empty: EmptyStep | None = None
        self._moves_alone = moves_alone
        self._scheduled: list[tuple[str, float]] | None = None
        self._backwards = self._expecting_more = self._stepped = self._placed = self._clips = False
        self._leader, self._microbatches, self._updates_before = self, 0, 0
        self._kind: LossKind | None = None
        self._own_weight, self._outcomes = 0.0, 0
        self._deferred: Tensor | None = None
        self._trained, self._names, self._trained_set = trained, frozenset(trained), trained_set
        self._placeholders = {name: placeholder(name, parameter) for name, parameter in trained.items()}
        self._places = not gradients.show_between(self._placeholders)
        self._seen = SeenGradients()
        self._norm, self._did, self._frozen = 0.0, list[str](), FrozenParameters(trained)
        self._changed_by_hooks, self._changed_before_clip = list[str](), list[str]()
        self._script_hooks = GradientHooks(trained)
        self._shown = shown
        self._alone, self._direct = context.lockstep.size == 1, DirectAdam(optimizer)
        self._sends = isinstance(optimizer, SeesParts)
        self._hooks = StepHooks(optimizer, self._before_step, self._after_step)
        self._randomness, self._stepping = context.forward_backward.compute.randomness, ExitStack()

    @property
    def update(self) -> Update | None:
        """What the step's update did; None before it."""
        done = self.outcome
        return None if done is None else Update(done.loss, done.norm, done.committed)

    @property
    def expects_more(self) -> bool:
        """Whether losses of this microbatch wait for another, with which they are computed."""
        return self._expecting_more

    @property
    def loss_is_counted(self) -> bool:
        """Whether the loss of this step is that of another player, which has made its update."""
        return self._leader is not self and self._leader.outcome is not None

    def begin(self, step: OpenStep) -> None:
        """Before the first microbatch of a step."""
        self.policy.begin(step.work)
        self._step, self._agreed, self.outcome = step, None, None
        self._loss, self._own_weight, self._kind = 0.0, 0.0, None
        self._scheduled, self._leader, self._microbatches = None, self, 0
        self._changed_before_clip = []
        self._seen = SeenGradients()  # the last gradients go before the next come, into whose memory they can

    def enter(self) -> None:
        """Before every microbatch."""
        self._backwards = self._expecting_more = self._stepped = False
        self._deferred = None
        self._hooks.reset()
        self._shown.reset()

    def leave(self) -> bool:
        """The loop asks for the next microbatch: whether this player has computed a gradient of this one."""
        step = self._opened()
        if self._expecting_more:
            raise UserCodeError(
                f"step {step.work.step}: backward(more=True) was the last for {step.place}; leave more=True out there"
            )
        if not step.is_last:
            self._check_schedule(f"behind {step.place}")
        return self._backwards

    def leave_step(self) -> bool:
        """The loop asks for the next step: whether this player has made its update. Raises `UserCodeError` where it has
        gradients and has not.
        """
        step, self._step = self._opened(), None
        if self._scheduled is not None and self._agreed is None:
            self._check_whole(step)
        if self._scheduled is not None and self.outcome is None:
            raise UserCodeError(
                f"step {step.work.step}: step() was not called for {step.place} on the optimizer that shoal.start was "
                "given; call it after every backward() (it waits for the last microbatch by itself), or once behind "
                "each step of run.steps()"
            )
        return self.outcome is not None

    def weighed(
        self, loss: Tensor, weight: float | None, *, kind: LossKind, more: bool, leader: Player
    ) -> Tensor | None:
        """The losses of this microbatch, each times what it counts; None where `more` follow. `leader` is the first of
        the players whose gradients this backward computes.
        """
        step = self._opened()
        self._trained_set.check(step.work.step)
        check_loss(loss)
        self._check_unscaled()
        if self._agreed is not None or self._stepped or (self._backwards and not self._expecting_more):
            raise UserCodeError(
                f"step {step.work.step}: backward() was called again for one batch, whose gradient has left already. "
                "For several losses, pass more=True to every backward() of a batch but the last; for several "
                "optimizers, backward(loss, optimizer=...) is for one of them alone. A batch has one gradient and one "
                "update: where it is to have more updates (as in PPO), let the data give it again; a second gradient "
                "of it at other weights (as in SAM) is not to be had"
            )
        self._check_weights_of(step, leader)
        if self._kind not in (None, kind):
            raise UserCodeError(
                'backward() has a weight or reduction="sum" for one batch and not for another; pass it always or never'
            )
        self._kind = kind
        counts = counts_of(step.microbatch, weight, kind)
        if not self._expecting_more:
            self._own_weight += counts
            self._microbatches += 1
        self._backwards, self._expecting_more = True, more
        self._check_schedule(f"before the backward() of {step.place}")
        if self._scheduled is None:
            self._scheduled = scheduled_in(self.optimizer.param_groups)
        self._loss = self._loss + counted(loss.detach(), counts)
        factor = step.factor(kind)
        total = loss if counts * factor == 1.0 else loss * (counts * factor)
        total = total if self._deferred is None else self._deferred + total
        self._deferred = total if more else None
        return None if more else total

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Around the backward of a microbatch, the `last` of a step or not."""
        if self._placed:
            for name, parameter in self._trained.items():
                if parameter.grad is self._placeholders[name]:
                    parameter.grad = None
            self._placed = False
        hooked = self._script_hooks.names
        with self._script_hooks.aside(hooked), self.gradients.backward(last=last):
            yield
        if last:
            self.agree(hooked)
        elif self._places:
            for name, parameter in self._trained.items():
                parameter.grad = self._placeholders[name]
            self._placed = True

    def clip(self, max_norm: float) -> float | None:
        """Scales the step's gradient down to the 2-norm `max_norm`, and returns the norm it had; None before the last
        backward of the step.
        """
        if self.agreed() is None:
            return None
        self.gradients.accept()
        changed = self._changed()
        self._changed_before_clip += changed  # which `_remember` forgets
        written = not self._clips or bool(changed)
        norm = self.gradients.clip(max_norm, believed=self._norm, written=written)
        self._clips = True
        self._remember(norm * clip_factor(max_norm, norm))
        return norm

    def agree(self, hooked: Sequence[str]) -> None:
        """After the last backward of a step: all ranks agree on the gradient, and vote. `hooked`: the parameters that
        have hooks of the script.
        """
        step, used, counts = self._opened(), self.gradients.used, self._context.counts
        self._check_whole(step)
        declared = Declaration(
            self._context.lockstep,
            self._loss if counts else 0.0,
            without=len(self._names) - len(used),
            decisions=[] if self._alone else self._decisions(),
            device=self._context.device,
        )
        work = step.work
        own = Work(work.step, work.batches, None, work.tally, declared, work.on_gradients)
        self.lr = float(self.optimizer.param_groups[0].get("lr", 0.0))
        over = self._denominator(step)
        terms = over if self._kind == "weighed" else None
        self._agreed = self.policy.agree(self._context, own, denominator=over, terms=terms)
        declared.check(work.step)
        if not declared.all_used:
            group, device = self._context.lockstep, self._context.device
            used = used_anywhere(sorted(self._names), used, group, device)
        self.gradients.expose(used)
        self._changed_by_hooks = []
        if hooked:
            changed = self._script_hooks.call(hooked, self._randomness.alike)
            self._changed_by_hooks = named("had its gradient changed by a hook in the step before", changed)
            if changed or self.gradients.divided:
                self.gradients.accept()
                self._agreed = replace(self._agreed, norm=float(self.gradients.measured()))
        self._remember(self._agreed.norm)
        if step.has_gradient():
            self._randomness.end_samples()

    def agreed(self) -> AgreedUpdate | None:
        """What all ranks have agreed on; None before the last backward of the step. Raises `UserCodeError` where this
        microbatch had none.
        """
        step = self._opened()
        if not self._backwards or self._expecting_more:
            raise UserCodeError(
                f"step {step.work.step}: step() was called before the last backward() of the batch; {self._cure()}"
            )
        return self._agreed

    def _cure(self) -> str:
        """What to do about a step without a backward."""
        own = [p.grad for name, p in self._trained.items() if p.grad is not self._placeholders[name]]
        if all(gradient is None for gradient in own):
            return "call backward() first, without more=True"
        return (
            ".grad has gradients of the loop's own, as of torch.autograd.grad or loss.backward(), which are those of "
            "this rank's microbatch alone: call run.backward(loss), and change .grad behind it"
        )

    def close(self) -> None:
        """Gives the optimizer back as it was, also out of the middle of a step."""
        self._give_back()
        self._hooks.close()
        self._shown.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._opened()
        try:
            with self._randomness.beside_loop():
                has_closure = len(args) > 1 or any(value is not None for value in kwargs.values())
                agreed = self._make_ready(step, has_closure=has_closure)
        except UserCodeError as refusal:
            step.stands(refusal)
            raise
        if agreed is not None:
            self._stepping.enter_context(self._randomness.updating(in_pieces=self.gradients.divided))

    def _make_ready(self, step: OpenStep, *, has_closure: bool) -> AgreedUpdate | None:
        """What all ranks have agreed on, if anything; the optimizer sees then what it is to step, and nothing else."""
        optimizer = self.optimizer
        self._check_unscaled()
        if has_closure:
            raise UserCodeError("optimizer.step() was given a closure; call it without, after the backward")
        if self._stepped:
            raise UserCodeError(f"step {step.work.step}: step() was called twice for one batch")
        agreed = self.agreed()
        self._stepped = True
        if agreed is not None:
            if not self._alone:
                changed = dict.fromkeys([*self._changed_before_clip, *self._changed()])
                self._did = named("had its gradient changed by the script in the step before", changed)
            self.gradients.accept()
            self.gradients.accept_weights()
            if agreed.committed:
                self._check_alike(step)
            if self._on_update is not None and agreed.committed:
                self._on_update(step.work.step, self.gradients.owned)
        updates = agreed is not None and agreed.committed
        if self._direct.step() if updates else self._direct.is_plain:
            self._empty = EmptyStep(optimizer, parameters=False)
        elif not updates:
            self._empty = EmptyStep(optimizer, parameters=True, moves_alone=self._moves_alone)
        return agreed

    def _give_back(self) -> None:
        """What the optimizer was not to see in its step."""
        if self._empty is not None:
            self._empty.end()
        self._empty = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with self._stepping:  # all of this without the mode that keys what the loop draws
            self._give_back()
            if self._agreed is None:
                return
            self.outcome = self.policy.conclude(self._context, self._agreed)
            self._outcomes += 1
            if self._opened().updated(committed=self.outcome.committed):
                self._context.keep_statistics()

    def _remember(self, norm: float) -> None:
        """The gradient as it is now, and its 2-norm; on one rank that alone, as there is no other to do alike, unless
        the loop clips.
        """
        self._norm = norm
        if self._clips or not self._alone:
            self._seen = SeenGradients.now(self.inputs)

    def _changed(self) -> list[str]:
        """The parameters whose gradients the script has changed since."""
        changed = SeenGradients.now(self.inputs).changed(self._seen)
        names = list(self._trained) if changed else []
        return [names[index] for index in changed]

    def _decisions(self) -> list[str]:
        """What all ranks have to decide alike."""
        return [
            *numbers_of(self.optimizer.param_groups),
            *named("is frozen", self._frozen.names),
            *self._did,
            *self._changed_by_hooks,
            *self._hooked(),
        ]

    def _hooked(self) -> list[str]:
        """What ranks have to agree on before all of them give hooks the whole of a divided gradient."""
        return named("has a hook of register_hook", self._script_hooks.names) if self.gradients.divided else []

    def _opened(self) -> OpenStep:
        if self._step is None:
            raise UserCodeError("there is no batch: call backward() and step() inside the loop over batches()")
        return self._step

    def _check_schedule(self, where: str) -> None:
        """Raises `UserCodeError` where the loop takes microbatches for steps."""
        if self._scheduled:
            check_unchanged(self._scheduled, self.optimizer.param_groups, f"step {self._opened().work.step}", where)

    def _denominator(self, step: OpenStep) -> float | None:
        """The weight of the global batch, if the loop weighs, and 1 for a sum; None: losses were divided already."""
        if self._kind != "weighed":
            return 1.0 if self._kind == "sum" else None
        total = self._sum(self._own_weight)
        if total <= 0:
            raise UserCodeError(f"step {step.work.step}: {NO_WEIGHT}")
        return total

    def _check_weights_of(self, step: OpenStep, leader: Player) -> None:
        """Raises `UserCodeError` where the step's gradient is not that of one loss and of one set of weights."""
        if self._scheduled is None:
            self._leader, self._updates_before = leader, step.updates
        if self._leader is not leader:
            raise UserCodeError(
                f"step {step.work.step}: one backward() is for all optimizers and another for one of them alone; name "
                "the same optimizer, or none, for every batch of a step"
            )
        if step.updates != self._updates_before and not self._expecting_more:
            raise UserCodeError(
                f"step {step.work.step}: another optimizer has made its update between two microbatches of this one, "
                "whose gradient would be of two sets of weights. Call both backward() before both step(); or, if one "
                "needs the other's update, take the microbatches once for each: for number, microbatches in "
                "run.steps(), and in it a loop over microbatches for each optimizer, with its step() behind it"
            )

    def _check_whole(self, step: OpenStep) -> None:
        """Raises `UserCodeError` where some microbatches had no backward of this player."""
        if self._microbatches != (wanted := len(step.batches)):
            raise UserCodeError(
                f"step {step.work.step}: {self._microbatches} of {wanted} microbatches had a backward() for one "
                "optimizer; call it for all of a step, with weight=0 for one that shall not count, or for none"
            )

    def _check_alike(self, step: OpenStep) -> None:
        """Raises `UserCodeError`, on every rank, where the optimizer would send what some ranks do not wait for."""
        if self._alone or not self._sends:
            return
        taken = named("has no gradient", [name for name, each in self._trained.items() if each.grad is None])
        told = taken or ["all parameters have gradients"]
        group, device = self._context.lockstep, self._context.device
        Declaration(group, 0.0, without=0, decisions=told, device=device).check(step.work.step)

    def _check_unscaled(self) -> None:
        """In the first step. Raises `UserCodeError` where the script, or who calls the optimizer, scales losses."""
        if self._outcomes or scaler_in(sys._getframe()) is None:
            return
        raise UserCodeError(
            "the script scales its loss by a GradScaler, which would skip updates on one rank and not on the others: "
            'set precision.kind = "float16", which scales for all ranks, and make it GradScaler(enabled=False)'
        )
