"""`Training`: a user's own loop on the parts of `shoal train`.

    run = shoal.start("run.toml", model=model, optimizer=optimizer, data=train_set)
    for inputs, targets in run.batches():
        loss = F.cross_entropy(model(inputs), targets)
        run.backward(loss)
        optimizer.step()

The loop sees this rank's microbatches, one after the other. `backward` weighs the loss, a mean over the microbatch, by
its share of the global batch, so that the sum of all ranks' gradients is the gradient of the mean over that batch:

    g = sum over ranks and microbatches m of (w_m / W) grad(loss_m),    W = sum of all w_m of the step

where w_m is the number of samples of m, or what the loop says. The optimizer's `step` does nothing until the step's
last microbatch; then ranks agree on the gradient, vote, and the optimizer updates what this rank owns
(`shoal.own_loop.update`). What is due between two steps (measurements, a checkpoint, a stop by a signal) happens
when the loop asks for the next batch.

`batches` goes through the whole run; `epochs` and `steps` give it in parts, for loops that have two levels. At the end
of a part nothing is due yet: what the loop does behind it (a scheduler, a test) belongs to the step before.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as uncompiled

from shoal.assembly.run import Run
from shoal.checkpoint.weights import write_weights
from shoal.engine.loop import Job, tell_of_saves
from shoal.engine.precision import cast_at_borders
from shoal.engine.tally import Call, meet
from shoal.engine.updates import Outcome
from shoal.errors import UserCodeError
from shoal.observe.sink import Ending
from shoal.optim.layer_statistics import aside
from shoal.own_loop.comparison import Comparison
from shoal.own_loop.evaluation import EvaluationOfRank
from shoal.own_loop.losses import AutocastWatch, Doubts, LossKind, Place, as_number, kind_of, one_pass
from shoal.own_loop.open_step import Update, around_all, joint_outcome, left_epoch
from shoal.own_loop.steps import DrawsBySample, Microbatches, OwnSteps, players_of
from shoal.own_loop.update import Player
from shoal.runfile.run_file import run_directory


class Training:
    """One rank of a run whose loop is the script's. `shoal.start` makes it; use it as a context manager, or call
    `close` at the end. With a `comparison`, the process ends after the steps that are compared. `compiled`: so is what
    the loop calls.
    """

    def __init__(
        self, run: Run, job: Job, stack: ExitStack, comparison: Comparison | None = None, *, compiled: bool = False
    ) -> None:
        self._run, self._job, self._stack, self._comparison = run, job, stack, comparison
        self._compute = run.step.compute
        lockstep = run.step.lockstep
        device = run.device
        self._players = players_of(
            run,
            lambda own: meet("sum() or mean()", lockstep, device=device, number=self._counted(own)),
            warn=job.sinks.warn,
            on_update=None if comparison is None else comparison.before_update,
        )
        models = list(self.model) if isinstance(self.model, nn.ModuleList) else [self.model]
        mixed = run.workload.precision.mixed
        self._casts = [] if mixed is None else [cast for each in models for cast in cast_at_borders(each, mixed)]
        watches = run.workload.precision.compute is not None and not compiled
        watch = AutocastWatch(models, device, run.run_file.precision.variant) if watches else None
        self._doubts = Doubts(job.sinks.warn, watch)
        self._draws = DrawsBySample(
            models, self._compute, inside=lambda: self._steps.open is not None, keys_loop=not compiled
        )
        after_step = None if comparison is None else self._compare
        self._steps = OwnSteps(run, job, self._players, self._draws, after_step=after_step)
        self._closed = self._ended = False
        self._evaluation = EvaluationOfRank(run, self._steps.given_of, training=self._is_training)

    @property
    def model(self) -> nn.Module:
        """The module that was handed over, as this rank has it: the same object. Several are in a `ModuleList`."""
        return self._run.model

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._run.mesh.rank

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self._run.mesh.layout.world_size

    @property
    def share(self) -> tuple[int, int]:
        """(index, number): which part of samples of the loop's own this rank takes, of how many. Ranks of one group of
        `layout.tensor` compute together, and have the same.
        """
        return self._run.mesh.batch_share

    @property
    def device(self) -> torch.device:
        """Where this rank computes; batches arrive there."""
        return self._run.device

    @property
    def directory(self) -> Path:
        """Where the run keeps its checkpoints and its log."""
        return run_directory(self._run.run_file)

    @property
    def steps_done(self) -> int:
        """Steps of the whole run that are over, those before a resume included. The step that is open, after its update
        too, counts when the next batch is asked for.
        """
        return self._job.progress.step

    @property
    def epoch(self) -> float:
        """How often the data has been gone through, in epochs."""
        return self._job.progress.samples / self._steps.epoch_samples

    @property
    def update(self) -> Update | None:
        """What the step's update did; None until it is made. With several optimizers: all of them together."""
        if all(player.outcome is None for player in self._players):
            return None
        done = joint_outcome(self._players)
        return Update(done.loss, done.norm, done.committed)

    @property
    def last_of_step(self) -> bool:
        """Whether no other microbatch of this step follows: the optimizer's `step` makes the update."""
        return self._steps.open is None or self._steps.open.is_last

    @property
    def samples(self) -> int:
        """Samples of this microbatch. 0: it is a copy that counts for nothing, in a step without samples for this rank;
        leave it out of measurements of your own.
        """
        step = self._steps.open
        if step is None:
            raise UserCodeError("there is no batch: use samples inside the loop over batches()")
        return step.microbatch.batch.real_samples

    @property
    def weights(self) -> Tensor:
        """What the losses of this microbatch's samples weigh, [samples] or the shape of the targets: 0 for padding and
        for records that were left out, else 1 or what the data says.
        """
        step = self._steps.open
        if step is None:
            raise UserCodeError("there is no batch: use weights inside the loop over batches()")
        return step.microbatch.batch.weights

    def batches(self) -> Iterator[Any]:
        """This rank's microbatches from where the run stands to its last step: what the data set's samples are, with a
        leading dim of samples, on the device.

        Raises `Stopped` after a signal and a checkpoint, `Diverged` if too many steps in a row were not finite,
        `UserCodeError` if the loop leaves a step unfinished, `DataError` where a sample cannot be read.
        """
        return self._steps.until(None)

    def epochs(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """The epochs from where the run stands to its last step: the number of each, from 0, and its `batches`.

        An epoch ends with the step that reaches the end of the data. A resumed run goes on inside its epoch. Raises
        what `batches` does.
        """
        size = self._steps.epoch_samples
        while not self._steps.all_given:
            before = self._steps.position
            end = (before // size + 1) * size
            yield before // size, self._steps.until(end)
            if self._steps.position == before:
                raise UserCodeError("the loop took no batch of an epoch; iterate over what epochs() gives with it")
            if self._steps.position < end and not self._steps.all_given:
                raise left_epoch(self._steps.position / size, size)
        self._steps.finish()

    def steps(self) -> Iterator[tuple[int, Microbatches]]:
        """The steps from where the run stands to its last: the number of each, from 0, and its microbatches on this
        rank, all of which are to be taken before the optimizer's step. A loop with several optimizers may take them
        once for each. Raises what `batches` does.
        """
        while (step := self._steps.next_step()) is not None:
            yield self.steps_done, Microbatches(partial(self._steps.microbatches, step))

    @uncompiled
    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | None = None,
        more: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        reduction: str = "mean",
    ) -> None:
        """Accumulates the gradient of `loss`, a scalar: the mean over the samples of the microbatch, or, where
        `reduction` is "sum", their sum; the step's gradient is then that of the sum over the global batch.

        `weight` is what the microbatch counts, if not its samples: say its number of tokens, of which `loss` is the
        mean; 0 for none. `more`: another `backward` of the same microbatch follows, for another loss, and both are
        computed there, in one pass. `optimizer`: whose parameters the gradient is of, where the loop has several; None:
        those of all.
        """
        step = self._steps.open
        try:
            with self._compute.randomness.beside_loop():
                self._backward(loss, kind_of(weight, reduction), weight=weight, more=more, optimizer=optimizer)
                self._steps.gradient_there()
        except Exception as error:
            if step is not None:
                step.stands(error)
            raise

    @uncompiled
    def step(self, *, clip_norm: float | None = None, optimizer: torch.optim.Optimizer | None = None) -> Update | None:
        """Calls the optimizer's `step`, once for every microbatch: makes the update after the last of a step, and
        returns None before it.

        `clip_norm`: the largest 2-norm of the gradient of all that the optimizer steps.
        """
        player = self._player(optimizer)
        if clip_norm is not None:
            with self._compute.randomness.beside_loop():
                player.clip(clip_norm)
        player.optimizer.step()
        return player.update

    @uncompiled
    def clip_grad_norm_(self, max_norm: float, *, optimizer: torch.optim.Optimizer | None = None) -> float | None:
        """Scales the gradient of the global batch down to the 2-norm `max_norm`, and returns the norm it had; None
        before the step's last microbatch. Call it between `backward` and the optimizer's `step`.
        `torch.nn.utils.clip_grad_norm_` does the same.
        """
        with self._compute.randomness.beside_loop():
            return self._player(optimizer).clip(max_norm)

    def save(self) -> None:
        """Asks for a checkpoint after this step, beside those of `checkpoint.every_steps`. Every rank calls it."""
        if self._steps.pending is None:
            raise UserCodeError("there is no step to save: call save() inside the loop over batches()")
        self._steps.pending.save = True

    def wait_for_save(self) -> None:
        """Until the checkpoint that `save` asked for is written, where the next batch is there. Every rank calls it."""
        tell_of_saves(self._job, self._job.saver.wait())

    def export(self, file: str | Path) -> None:
        """Writes the model's whole weights to `file` in safetensors' format, in place of one that is there. Every rank
        calls it, between two steps or behind an update. Raises `EnvironmentFault` where it cannot be written.
        """
        self._meet("export()")
        if self._comparison is not None:
            return  # a comparison writes no file of the script's
        with self.full_parameters():
            if self.rank == 0:
                state, names = self.model.state_dict(), {}
                for name, tensor in state.items():  # tied weights once
                    names.setdefault((tensor.data_ptr(), tensor.shape), name)
                write_weights({name: state[name].contiguous() for name in names.values()}, Path(file))
        self._run.mesh.world.barrier().wait()

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Records measurements of this rank beside those of the step: name and number, such as "accuracy/train"."""
        numbers = {name: as_number(value) for name, value in values.items()}
        self._job.sinks.record(self._steps.given, numbers, time_s=time.time())

    def note(self, text: str) -> None:
        """Says a sentence where the run's progress is shown, and in its log."""
        self._job.sinks.note(text)

    def held_out(self) -> Iterator[Any]:
        """This rank's part of the held-out samples, each once, with the model in evaluation mode and without gradients.

        Between two steps, or after the last one. Raises `UserCodeError` where no held-out data was handed over.
        """
        source = self._run.workload.data.held_out
        if source is None:
            raise UserCodeError("there is no held-out data; hand over data=(training, held_out)")
        self._meet("held_out()")
        yield from self._evaluation.held_out(source)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around forwards on samples of the loop's own: every rank has all parameters, the model is in evaluation mode,
        and nothing has a gradient. Every rank enters it, between two steps or behind an update.
        """
        self._meet("evaluation()")
        with self._evaluation.evaluating():
            yield

    def sum(self, value: float | Tensor) -> float:
        """The sum of a number over all ranks, in float64; of ranks that have the same samples, one counts. Every rank
        calls it, or all of them raise `UserCodeError`.
        """
        return self._meet("sum() or mean()", self._counted(as_number(value)))

    def mean(self, value: float | Tensor, *, weight: float = 1.0) -> float:
        """The mean of a number over all ranks, each counting `weight`. Every rank calls it."""
        total, weights = self.sum(as_number(value) * weight), self.sum(weight)
        return total / weights if weights else math.nan

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has every parameter whole, which ZeRO-3 otherwise divides: to read or to export them."""
        return self._run.generation.gradients.full_parameters()

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward and its loss: computes in the type of `[precision]`."""
        return self._run.workload.precision.autocast(self.device)

    def leave(self) -> None:
        """Ends the loop here, before its last step, and writes a checkpoint that `save` has asked for: what the script
        does to the weights afterwards is not in it. Every rank calls it, and asks for no further batch.
        """
        self._steps.leave()

    def divide_by(self, samples: int) -> None:
        """Every rank is given as many microbatches of a step as one process that takes `samples` at once, before the
        first step. `batch.micro_samples` is `samples` over the ranks; where a rank has too few, copies count nothing.
        """
        self._steps.divides_by = samples

    def end(self) -> None:
        """Ends the run here as one that is finished, with a checkpoint, for loops that alone know which step is their
        last. Every rank calls it, behind an update.
        """
        if self._closed:
            return
        self._ended = True
        if self._steps.pending is not None:
            self._steps.pending.save = True
        self.leave()

    def close(self) -> None:
        """Ends the run on this rank, and writes how it ended. A second call does nothing.

        A loop that was left before its last step has no checkpoint of the steps since the last one; that is said.
        Raises `UserCodeError`, on every rank, where others go on.
        """
        if self._closed:
            return
        self._closed = True
        if self._steps.all_given and self.update is not None:
            self._steps.finish()
        elif self.steps_done < self._job.cadence.steps:
            self._steps.leave()
        if self._comparison is not None:
            self._comparison.conclude(over=True)
        self._run.settle()
        self._leave_script()
        done, steps_wanted = self.steps_done, self._job.cadence.steps
        if done < steps_wanted and not self._ended:
            cause = f"the loop was left after step {done} of {steps_wanted}: the next start resumes from the newest "
            self._job.sinks.warn(cause + "checkpoint")
            self._job.sinks.finish(Ending("stopped", cause + "checkpoint"))
        self._stack.close()

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._closed = True
        self._leave_script()
        self._stack.__exit__(kind, error, trace)

    def _backward(
        self, loss: Tensor, kind: LossKind, *, weight: float | None, more: bool, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._draws.check_thread()
        self._evaluation.check()
        players = self._players if optimizer is None else [self._player(optimizer)]
        joined = players[0].expects_more
        totals = [player.weighed(loss, weight, kind=kind, more=more, leader=players[0]) for player in players]
        step = self._steps.open
        place = Place(self._steps.given, "" if step is None else step.place, self._players.index(players[0]))
        self._doubts.look(loss, kind, place, self._steps.pending, lambda: self.samples)
        if totals[0] is None:
            return
        last = step is not None and step.is_last
        alike = self._evaluation.compare(totals[0], last=last)
        around = players[0].backward(last=last) if len(players) == 1 else around_all(players, last=last)
        others = [player.optimizer for player in self._players if player not in players]
        away = aside(others) if others else nullcontext()
        with around, self._compute.randomness.drawing(), one_pass(joined=joined), away:
            self._compute.begin_backward()
            totals[0].backward(inputs=players[0].inputs if others else None)  # pyright: ignore[reportArgumentType]
        alike()

    def _player(self, optimizer: torch.optim.Optimizer | None) -> Player:
        if optimizer is None and len(self._players) == 1:
            return self._players[0]
        found = next((player for player in self._players if player.optimizer is optimizer), None)
        if found is None:
            raise UserCodeError(
                "this run has several optimizers; say which one: step(optimizer=...), clip_grad_norm_(c, optimizer=...)"
                if optimizer is None
                else "this optimizer was not handed over to shoal.start"
            )
        return found

    def _compare(self, step: int, outcome: Outcome) -> None:
        """After a step of `shoal verify mine.py`; this process ends where all is said."""
        assert self._comparison is not None, "only a comparison calls this"
        if self._comparison.after_step(step, outcome):
            self._closed = True
            self._leave_script()
            self._job.sinks.finish(Ending("stopped", "the steps that were to be compared are taken"))
            self._stack.close()
            sys.exit(0)

    def _counted(self, number: float) -> float:
        """0 on a rank whose samples another one counts."""
        return number if self._run.step.context.counts else 0.0

    def _is_training(self) -> bool:
        """Is the loop at a step, before its update?"""
        return self._steps.open is not None and self.update is None

    def _leave_script(self) -> None:
        """The script's model and optimizers are its own again."""
        self._draws.close()
        self._evaluation.close()
        for cast in self._casts:
            cast.remove()
        for player in self._players:
            player.close()

    def _meet(self, call: Call, number: float = 0.0) -> float:
        """The sum of `number` over all ranks: where they take steps together, on the group on which these begin."""
        lockstep, world = self._run.step.lockstep, self._run.mesh.world
        return meet(call, lockstep if lockstep.size == world.size else world, device=self.device, number=number)
