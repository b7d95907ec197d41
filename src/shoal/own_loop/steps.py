"""`OwnSteps`: which step and which microbatch a script's own loop is at.

Each step is opened (its samples are counted, its microbatches made ready), given to the script microbatch by
microbatch, and ended when the script asks for more: then the update has been made, and what is due after it
(measurements, a checkpoint, a stop) happens. Leaving out a microbatch, a `backward()` or an update is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from shoal.assembly.profiling import profiled
from shoal.assembly.run import Run
from shoal.assembly.trainable import TrainedSet
from shoal.data.inputs import AsInputs
from shoal.data.sample import Batch, padding_like
from shoal.engine.compute import Compute
from shoal.engine.loop import Job, PendingStep, steps
from shoal.engine.tally import meet
from shoal.engine.updates import Outcome, Work
from shoal.errors import UserCodeError
from shoal.gradients.gradients import JointGradients, VisibleGradients
from shoal.gradients.split_shells import SplitGradients, script_parameters
from shoal.models.draw_watch import DrawWatch
from shoal.own_loop.module_counts import ModuleCounts
from shoal.own_loop.open_step import OpenStep, joint_outcome
from shoal.own_loop.shown_optimizer import ShownGroups
from shoal.own_loop.update import OnUpdate, Player


def players_of(
    run: Run,
    sum_over_ranks: Callable[[float], float],
    *,
    warn: Callable[[str], None],
    on_update: OnUpdate | None = None,
) -> list[Player]:
    """A player for each optimizer that the script handed over. What `[optimizer]` says is not theirs: they clip when
    the script asks for it. `on_update` is called before every update, `warn` with a sentence for the user.
    """
    gradients, optimizers = run.generation.gradients, run.workload.optimizers
    if isinstance(gradients, SplitGradients):
        gradients.install(run.model)
    trained = script_parameters(gradients, run.trained)
    pieces: dict[nn.Parameter, list[nn.Parameter]] = {}
    for own in gradients.owned:
        if own.parameter is not trained[own.name]:
            pieces.setdefault(trained[own.name], []).append(own.parameter)
    shown = [
        ShownGroups(own.optimizer, [[trained[name] for name in group] for group in own.groups], pieces, warn=warn)
        for own in optimizers
    ]
    trained_set = TrainedSet(run.model, trained, [own.optimizer for own in optimizers])
    parts = gradients.parts if isinstance(gradients, JointGradients) else [gradients]
    players = []
    for own, part, groups in zip(optimizers, parts, shown, strict=True):
        assert isinstance(part, VisibleGradients), "a schedule by priority is refused in a script's own loop"
        players.append(
            Player(
                own.optimizer,
                part,
                run.step.context,
                {name: trained[name] for name in own.names},
                shown=groups,
                trained_set=trained_set,
                sum_over_ranks=sum_over_ranks,
                on_update=on_update,
                moves_alone=own.moves_alone,
            )
        )
    return players


class Microbatches:
    """The microbatches of one step, as the script gets them. Each loop over it is a pass over all of them: loops with
    several optimizers may take one for each.
    """

    def __init__(self, one_pass: Callable[[], Iterator[Any]]) -> None:
        self._one_pass = one_pass

    def __iter__(self) -> Iterator[Any]:
        return self._one_pass()


class OwnSteps:
    """The steps of `job`, whose updates the `players` make.

    `open` is the step that the script is at, `pending` what the loop knows of it; None between two steps. `divides_by`:
    a step has as many microbatches on every rank as there are parts of so many of its samples. `after_step` is called
    with the number and the outcome of each, when the script asks for the next.
    """

    def __init__(
        self,
        run: Run,
        job: Job,
        players: Sequence[Player],
        draws: DrawsBySample,
        *,
        after_step: Callable[[int, Outcome], None] | None = None,
    ) -> None:
        self.open: OpenStep | None = None
        self.pending: PendingStep | None = None
        self.divides_by: int | None = None
        self._run, self._job, self._players = run, replace(job, feed=profiled(run, job.feed)), players
        self._compute, self._draws = run.step.compute, draws
        self._each = self._opened()
        self._weights = {each.holding.name: each.parameter for each in run.trained}
        self._told_of_weights = False
        self._counts: ModuleCounts | None = ModuleCounts(run.model)
        self._leaving, self._after_step = False, after_step
        self._with_targets = not isinstance(run.workload.data.train, AsInputs)

    @property
    def epoch_samples(self) -> int:
        """Samples of one epoch."""
        return self._run.epoch_samples

    @property
    def given(self) -> int:
        """Steps that the script has been given."""
        return self._job.progress.step + (self.open is not None)

    @property
    def all_given(self) -> bool:
        """Whether the script has been given the last step."""
        return self.given >= self._job.cadence.steps

    @property
    def position(self) -> int:
        """Samples of the steps that the script has been given."""
        open_samples = 0 if self.pending is None else self.pending.samples
        return self._job.progress.samples + open_samples

    def next_step(self) -> OpenStep | None:
        """Ends the open step and opens the next; None after the last."""
        return next(self._each, None)

    def until(self, position: int | None) -> Iterator[Any]:
        """The microbatches of the steps up to that position in the order of samples; None: of all."""
        while position is None or self.position < position:
            step = self.next_step()
            if step is None:
                return
            yield from self.microbatches(step)

    def microbatches(self, step: OpenStep) -> Iterator[Any]:
        """The inputs of each microbatch of the open step. Raises `UserCodeError` where one got no `backward()`."""
        if step.begun:
            self._compute.buffers.next_pass()
        for index, batch in enumerate(step.batches):
            self._look_at_counts(step)
            step.enter(index, self._compute.prepared(batch))
            for player in self._players:
                player.enter()
            self._compute.announce(step.microbatch, lambda: step.factor())
            with self._compute.coupled(), self._draws.loop():
                yield self.given_of(step.microbatch.batch)
            step.check()
            self._look_at_weights(step)
            if index == 1:
                self._look_at_counts(step)
            computed = [player.leave() for player in self._players]
            if not any(computed):
                raise UserCodeError(
                    f"step {step.work.step}: no backward() was called for {step.place}; the other ranks wait for its "
                    "gradient. Call it for every batch, with weight=0 for one that shall not count"
                )

    def finish(self) -> None:
        """Ends the last step."""
        if self.next_step() is not None:
            raise AssertionError("the last step has been given")

    def leave(self) -> None:
        """The loop ends here, before the last step. A second call does nothing. Raises `UserCodeError`, on every rank,
        where others go on.
        """
        if self._leaving:
            return
        if self.open is not None:
            self.open.check()
        self._leaving = True
        if self.open is not None and self.open.is_last and any(player.outcome is not None for player in self._players):
            self.next_step()  # ends this one; those who go on begin another
        else:
            self._meet_at_end()

    def _meet_at_end(self) -> None:
        meet("the end of the loop", self._run.step.lockstep, device=self._run.device)

    def gradient_there(self) -> None:
        """The gradient of the microbatch is there."""
        if self.open is not None and not self.open.is_last and not self._told_of_weights:
            self.open.versions = [weight._version for weight in self._weights.values()]

    def _look_at_weights(self, step: OpenStep) -> None:
        """Warns once of a loop that writes weights between two microbatches of a step."""
        if not step.versions:
            return
        now = zip(self._weights.items(), step.versions, strict=False)
        written = next((name for (name, weight), version in now if weight._version != version), None)
        if written is None:
            return
        self._told_of_weights = True
        self._job.sinks.warn(
            f"step {step.work.step}: the loop wrote {written} behind {step.place}, and the next ones compute with "
            "other weights: the result depends on how a batch is divided. Write weights after an update: if run.update"
        )

    def _look_at_counts(self, step: OpenStep) -> None:
        """Warns once of a model that counts microbatches; in the first step that has several."""
        if self._counts is None or len(step.batches) < 2:
            return
        if (said := self._counts.look()) is not None:
            self._job.sinks.warn(f"step {step.work.step}: {said}")
        if self._counts.is_over:
            self._counts = None

    def given_of(self, batch: Batch) -> Any:
        """What the script gets of a batch: what its data set's samples are; of a source of Shoal's own inputs and
        targets.
        """
        return (batch.inputs, batch.targets) if self._with_targets else batch.inputs

    def _alike(self, batches: Sequence[Batch], samples: int) -> list[Batch]:
        """As many microbatches as the other ranks of a sharded model have, or as the loop wants of a step of so many
        `samples`. None is padded: the loss is its mean.
        """
        uniform, missing = self._run.generation.microbatching.uniform, 0
        if self.divides_by is not None:
            missing = math.ceil(samples / self.divides_by) - len(batches)
        elif uniform is not None:
            missing = uniform.count(len(batches)) - len(batches)
        return [*batches, *[padding_like(batches[-1], 1)] * missing] if missing else list(batches)

    def _opened(self) -> Iterator[OpenStep]:
        """Each step; what is due after it happens when the next is asked for."""
        for pending in steps(self._job):
            if self._leaving:
                self._meet_at_end()
                return
            work = self._run.step.begin(
                pending.number, pending.microbatches, lr=None, samples=pending.samples, stop=pending.stop
            )
            injector = self._run.process.injector
            with nullcontext(work) if injector is None else injector.around_own(work) as work:
                yield from self._taken(pending, work)

    def _taken(self, pending: PendingStep, work: Work) -> Iterator[OpenStep]:
        """The step, open until the next is asked for; then its result is known."""
        batches = self._alike(work.batches, pending.samples)
        self.pending = pending
        self.open = OpenStep(work, batches, scale=self._run.step.scale, optimizers=len(self._players))
        for player in self._players:
            player.begin(self.open)
        yield self.open
        self.open.check()
        if not self.open.is_last:
            raise UserCodeError(f"step {work.step}: the loop did not go beyond {self.open.place}; take them all")
        updated = [player.leave_step() for player in self._players]
        if not any(updated):
            raise UserCodeError(f"step {work.step}: no backward() was called; call it for every batch")
        outcome = joint_outcome(self._players)
        pending.lr, pending.result = self._players[0].lr, self._run.step.end(work, outcome)
        if self._after_step is not None:
            self._after_step(work.step, outcome)
        self.open = self.pending = None


# Random numbers of a loop of a script's own, and of the model that it calls: keyed on the samples.
#
# Hooks around the models' forwards enter the keyed draws (`shoal.models.keyed_draws`) and leave them. A model that
# draws nothing is called without them, and one that drops has the modules that do so called under them, as under `shoal
# train` (`shoal.models.draw_watch`), if it is one model, called once a microbatch, whose buffers nobody has changed
# since that was given: a forward that has drawn after all can then be repeated. Between its
# forwards, its backward and its update the loop itself is under them: it calls little, and may draw anything.


ADDED = "a layer that was added after shoal.start"
"""Stands among the names of unkeyed functions, for the forward that was the first to call it."""


class DrawsBySample:
    """Keys what `models` draw while they train, where `inside` says that a step is open, and between `enter_loop` and
    `leave_loop` what the loop draws, unless it calls compiled programs (`keys_loop`), which no mode can look into.
    `compute` is how a rank calls them under `shoal train`. Call `close` to give the models back.
    """

    def __init__(
        self, models: Sequence[nn.Module], compute: Compute, *, inside: Callable[[], bool], keys_loop: bool = True
    ) -> None:
        self._sleeping, self._buffers, self._inside = compute.randomness.sleeping, compute.buffers, inside
        self._open: list[_Forward] = []
        self._thread = get_ident()
        self._keys_loop, self._hooks = keys_loop, ExitStack()
        self._looks = self._sleeping is not None and not self._sleeping.draws.asleep
        if self._sleeping is None or not (self._looks or keys_loop):
            return
        if len(models) > 1:
            self._sleeping.may_sleep = False
        draws, asleep = self._sleeping.draws, self._sleeping.draws.asleep
        draws.wake()  # for its hooks to know their places
        for model in models:
            for handle in (
                # before the draws' own hook, which has to find them entered, or the model's own draws had no module
                model.register_forward_pre_hook(self._before, prepend=True),
                model.register_forward_hook(self._returned, prepend=True, with_kwargs=True),
                model.register_forward_hook(self._after, always_call=True),
            ):
                self._hooks.callback(handle.remove)
        if asleep:
            draws.sleep()

    def __deepcopy__(self, memo: object) -> DrawsBySample:
        """A model that is copied takes its hooks along. They do nothing there: the copy draws as the loop does."""
        copied = copy(self)
        copied._sleeping = None
        return copied

    def enter_loop(self) -> None:
        """The loop is given a microbatch."""
        self._thread = get_ident()
        if self._sleeping is not None and self._keys_loop:
            self._sleeping.draws.enter_loop()

    def leave_loop(self) -> None:
        """It asks for the next, or ends."""
        if self._sleeping is not None and self._sleeping.draws.in_loop:
            self._sleeping.draws.leave_loop()

    def check_thread(self) -> None:
        """Raises `UserCodeError` where another thread was given the microbatch, which may be at the next already."""
        if self._thread != get_ident():
            raise UserCodeError(
                "backward() was called in another thread than the one that took the batch, as by a queue that reads "
                "ahead: a batch is given when the step before it is over, and draws are keyed in the thread that takes "
                "it. Loop over the batches where backward() is called; Shoal reads ahead by itself (data.readers)"
            )

    def loop(self) -> AbstractContextManager[None]:
        """Around what the loop does with a microbatch."""
        return _Loop(self)

    def close(self) -> None:
        """Takes the hooks off the models."""
        self.leave_loop()
        self._hooks.close()

    def _before(self, module: nn.Module, inputs: object) -> None:
        sleeping = self._sleeping
        if torch.compiler.is_compiling() or sleeping is None:
            return
        draws, resume = sleeping.draws, None
        if draws.in_loop:
            resume = partial(draws.enter_loop, here=draws.leave_loop())
        if not module.training or not self._inside():
            self._open.append(_Forward(None, entered=False, resume=resume))
            return
        sleeping.forwards += 1
        once = sleeping.forwards == 1 and self._buffers.at_start()
        hooked = draws.is_called_with(module)
        if self._looks and not once:
            sleeping.stay()
        entered = not draws.asleep
        watch = sleeping.watch() if sleeping.may_sleep or not entered else None
        forward = _Forward(watch, entered=entered, learns=entered and not draws.dozes, resume=resume)
        forward.repeatable = sleeping.may_sleep and once
        self._open.append(forward)
        if entered:
            draws.open()
        if not hooked and draws.is_called_with(module):  # too late for this call
            draws.begin_call()

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """None, or the output of a repeated forward in the place of one that has drawn without the draws."""
        sleeping = self._sleeping
        if torch.compiler.is_compiling() or sleeping is None or not self._open:
            return None
        if (watch := self._open[-1].watch) is None:
            return None
        if self._open[-1].learns:
            sleeping.learn(watch, stays=False)
            return None
        if not watch.drew():
            return None
        if not self._open[-1].repeatable:
            sleeping.stay()
            sleeping.draws.unkeyed.add(ADDED)
            return None
        sleeping.start_again(watch, self._buffers.take_back)
        with sleeping.draws, sleeping.draws.calling():
            return module.forward(*args, **kwargs)

    def _after(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if torch.compiler.is_compiling() or self._sleeping is None or not self._open:
            return
        forward = self._open.pop()
        if forward.entered:
            self._sleeping.draws.__exit__(None, None, None)
        if forward.resume is not None:
            forward.resume()


class _Loop:
    """See `DrawsBySample.loop`. A class, as a step has no time for a generator of each."""

    def __init__(self, draws: DrawsBySample) -> None:
        self._draws = draws

    def __enter__(self) -> None:
        self._draws.enter_loop()

    def __exit__(self, *_: object) -> None:
        self._draws.leave_loop()


class _Forward:
    """A forward under way. `watch` is None where the draws are there to stay; `entered`: it runs under them; `learns`:
    what it draws decides whether the next ones do; `resume` enters the loop again that has called it; None where none
    has. `repeatable`: it can be taken back.
    """

    repeatable = True

    def __init__(
        self, watch: DrawWatch | None, *, entered: bool, resume: Callable[[], None] | None, learns: bool = False
    ) -> None:
        self.watch, self.entered, self.resume, self.learns = watch, entered, resume, learns
