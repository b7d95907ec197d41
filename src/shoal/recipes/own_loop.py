"""`Training`: a user's own loop on the parts of `shoal train`.

    run = shoal.start("run.toml", model=model, optimizer=optimizer, data=train_set)
    for inputs, targets in run.batches():
        loss = F.cross_entropy(run.model(inputs), targets)
        run.backward(loss)
        run.step()

The loop sees this rank's microbatches, one after the other. `backward` weighs the loss, a mean over the microbatch, by
its share of the global batch, so that the sum of all ranks' gradients is the gradient of the mean over that batch:

    g = sum over ranks and microbatches m of (w_m / W) grad(loss_m),    W = sum of all w_m of the step

where w_m is the number of samples of m, or what the loop says. `step` does nothing until the step's last microbatch;
then ranks agree on the gradient, vote, and the optimizer updates what this rank owns. What is due between two steps
(measurements, a checkpoint, a stop by a signal) happens when the loop asks for the next batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from shoal.data.feed import evaluation_batches
from shoal.data.sample import Batch
from shoal.engine.compute import Microbatch
from shoal.engine.loop import Job, PendingStep, steps
from shoal.engine.updates import AtOnce, Outcome, Work
from shoal.errors import UserCodeError
from shoal.observe.ending import Ending
from shoal.recipes.run import Run


class Update(NamedTuple):
    """What an update did: the loss over the global batch, the 2-norm of its gradient, and whether both were finite. One
    that was not has changed nothing, and is false.
    """

    loss: float
    grad_norm: float
    committed: bool

    def __bool__(self) -> bool:
        return self.committed


class Training:
    """One rank of a run whose loop is the script's. `shoal.start` makes it; use it as a context manager, or call
    `close` at the end.
    """

    def __init__(self, run: Run, job: Job, stack: ExitStack) -> None:
        self._run, self._job, self._stack = run, job, stack
        self._policy = cast(AtOnce, run.step.policy)
        self._compute = run.step.context.forward_backward.compute
        self._open: _OpenStep | None = None
        self._forwards = ExitStack()
        self._draw_by_sample()

    @property
    def model(self) -> nn.Module:
        """The module to call: the one that was handed over, as this rank has it."""
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
    def device(self) -> torch.device:
        """Where this rank computes; batches arrive there."""
        return self._run.device

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken in the whole run so far, those before a resume included."""
        return self._job.progress.step

    @property
    def epoch(self) -> float:
        """How often the data has been gone through, in epochs."""
        return self._job.progress.samples / len(self._run.workload.data.train)

    def batches(self) -> Iterator[Any]:
        """This rank's microbatches from where the run stands to its last step: what the data set's samples are, with a
        leading dim of samples, on the device.

        Raises `Stopped` after a signal and a checkpoint, `Diverged` if too many steps in a row were not finite,
        `UserCodeError` if the loop leaves a step unfinished, `DataError` where a sample cannot be read.
        """
        for pending in steps(self._job):
            self._begin(pending)
            step = self._opened()
            for index, batch in enumerate(step.batches):
                step.enter(index, self._compute.prepared(batch))
                self._compute.announce(step.microbatch, lambda step=step: step.factor())
                with self._compute.coupled():
                    yield step.microbatch.batch.inputs
                step.leave()
            pending.lr, pending.result = step.lr, self._run.step.end(step.work, step.outcome())
            self._open = None

    def backward(self, loss: Tensor, *, weight: float | None = None, more: bool = False) -> None:
        """Accumulates the gradient of `loss`, a scalar: the mean over the samples of the microbatch.

        `weight` is what the microbatch counts, if not its samples: say its number of tokens, of which `loss` is the
        mean; 0 for none. `more`: another `backward` of the same microbatch follows, for another loss.
        """
        step = self._opened()
        total, last = step.weigh(loss, weight), step.is_last and not more
        step.note_backward(more=more)
        with self._policy.gradients.backward(last=last), self._compute.randomness.drawing():
            total.backward()

    def step(self, *, clip_norm: float | None = None) -> Update | None:
        """Once for every microbatch: makes the update after the last of a step, and returns None before it.

        `clip_norm`: the largest 2-norm of the gradient of the whole model.
        """
        step = self._opened()
        step.note_step()
        if not step.is_last:
            return None
        denominator = step.denominator(self._sum)
        step.work.loss.start(step.loss)
        step.lr = float(self._job.state.optimizer.optimizer.param_groups[0]["lr"])
        outcome = self._policy.update(self._run.step.context, step.work, denominator=denominator, clip_norm=clip_norm)
        step.conclude(outcome)
        return Update(outcome.loss, outcome.norm, outcome.committed)

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Records measurements of this rank beside those of the step: name and number, such as "accuracy/train"."""
        number = self.steps_done + (self._open is not None)
        self._job.sinks.record(number, {name: float(value) for name, value in values.items()}, time_s=time.time())

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
        run_file, (share, shares) = self._run.run_file, self._run.mesh.batch_share
        micro = self._run.generation.microbatching.samples or max(1, run_file.batch.global_samples // shares)
        batches = evaluation_batches(
            source,
            replicas=shares,
            replica=share,
            micro_samples=micro,
            denominator="samples",
            limit=run_file.observe.evaluate_samples,
        )
        with self.full_parameters(), torch.no_grad(), _evaluating(self.model):
            for batch in batches:
                yield self._compute.prepared(batch).batch.inputs
        self._compute.buffers.refresh()

    def sum(self, value: float | Tensor) -> float:
        """The sum of a number over all ranks, in float64. Every rank calls it."""
        return self._sum(float(value))

    def mean(self, value: float | Tensor, *, weight: float = 1.0) -> float:
        """The mean of a number over all ranks, each counting `weight`. Every rank calls it."""
        total, weights = self._sum(float(value) * weight), self._sum(float(weight))
        return total / weights if weights else math.nan

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has every parameter whole, which ZeRO-3 otherwise divides: to read or to export them."""
        return self._policy.gradients.full_parameters()

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward and its loss: computes in the type of `[precision]`."""
        return self._run.workload.precision.autocast(self.device)

    def close(self) -> None:
        """Ends the run on this rank, and writes how it ended. A second call does nothing.

        A loop that was left before its last step has no checkpoint of the steps since the last one; that is said.
        """
        self._forwards.close()
        done, steps_wanted = self.steps_done, self._job.cadence.steps
        if done < steps_wanted:
            cause = f"the loop was left after step {done} of {steps_wanted}: the next start goes on from the newest "
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
        self._forwards.close()
        self._stack.__exit__(kind, error, trace)

    def _opened(self) -> _OpenStep:
        if self._open is None:
            raise UserCodeError("there is no batch: call backward() and step() inside the loop over batches()")
        return self._open

    def _begin(self, pending: PendingStep) -> None:
        work = self._run.step.begin(pending.number, pending.microbatches, lr=None, stop=pending.stop)
        self._policy.begin(work)
        uniform = self._run.generation.microbatching.uniform
        batches = list(pending.microbatches) if uniform is None else uniform(pending.microbatches)
        self._open = _OpenStep(work, batches, scale=self._run.step.context.scaler.scale, device=self.device)

    def _sum(self, own: float) -> float:
        lockstep = self._run.step.context.lockstep
        total = torch.tensor(own, dtype=torch.float64, device=self.device)
        if lockstep.size > 1:
            lockstep.all_reduce(total).wait()
        return float(total)

    def _draw_by_sample(self) -> None:
        """What the model draws in its forward is keyed on the samples, as under `shoal train`."""
        draws = self._compute.randomness.draws
        if draws is None:
            return
        entered: list[AbstractContextManager[Any]] = []

        def before(module: nn.Module, inputs: object) -> None:
            if module.training and self._open is not None:
                draws.__enter__()
                entered.append(draws)

        def after(module: nn.Module, inputs: object, outputs: object) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)

        for handle in (
            self.model.register_forward_pre_hook(before),
            self.model.register_forward_hook(after, always_call=True),
        ):
            self._forwards.callback(handle.remove)


class _OpenStep:
    """One step while the loop is at it: which microbatch, what was called, and what the losses weigh."""

    def __init__(self, work: Work, batches: list[Batch], *, scale: float, device: torch.device) -> None:
        self.work, self.batches, self.lr = work, batches, 0.0
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self._scale, self._index = scale, 0
        self._microbatch: Microbatch | None = None
        self._backwards = self._expecting_more = self._stepped = False
        self._weighed_by_loop: bool | None = None
        self._own_weight = 0.0
        self._outcome: Outcome | None = None

    @property
    def microbatch(self) -> Microbatch:
        assert self._microbatch is not None, "a microbatch has been entered"
        return self._microbatch

    @property
    def is_last(self) -> bool:
        return self._index == len(self.batches) - 1

    def factor(self) -> float:
        """What a loss of weight 1 is multiplied by before the backward, as far as it is known."""
        return self._scale if self._weighed_by_loop else self._scale / self.work.tally.wait().denominator

    def enter(self, index: int, microbatch: Microbatch) -> None:
        self._index, self._microbatch = index, microbatch
        self._backwards = self._expecting_more = self._stepped = False

    def leave(self) -> None:
        """The loop asks for the next microbatch."""
        if not self._backwards:
            raise UserCodeError(
                f"step {self.work.step}: no backward() was called for microbatch {self._index + 1} of "
                f"{len(self.batches)}; the other ranks wait for its gradient. Call it for every batch, with "
                "weight=0 for one that shall not count"
            )
        if not self._stepped:
            raise UserCodeError(
                f"step {self.work.step}: step() was not called for microbatch {self._index + 1} of "
                f"{len(self.batches)}; call it after every backward(): it waits for the last microbatch by itself"
            )

    def note_backward(self, *, more: bool) -> None:
        if self._stepped or (self._backwards and not self._expecting_more):
            raise UserCodeError(
                f"step {self.work.step}: backward() was called again for one batch, whose gradient has left already; "
                "pass more=True to every backward() of a batch but the last, and call step() after that"
            )
        self._backwards, self._expecting_more = True, more

    def note_step(self) -> None:
        if not self._backwards or self._expecting_more:
            raise UserCodeError(
                f"step {self.work.step}: step() was called before the last backward() of the batch; call backward() "
                "first, without more=True"
            )
        if self._stepped:
            raise UserCodeError(f"step {self.work.step}: step() was called twice for one batch")
        self._stepped = True

    def weigh(self, loss: Tensor, weight: float | None) -> Tensor:
        """The loss times what it counts; adds to the sums of the step."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
            what = "without a gradient" if isinstance(loss, Tensor) and loss.numel() == 1 else what
            raise UserCodeError(f"the loss is {what}; backward() takes a scalar tensor that depends on the model")
        if self._weighed_by_loop not in (None, weight is not None):
            raise UserCodeError("backward() has a weight for one batch and none for another; pass it always or never")
        self._weighed_by_loop = weight is not None
        counts = self.microbatch.batch.weights.sum().item() if weight is None else float(weight)
        if not self._expecting_more:
            self._own_weight += counts
        self.loss += loss.detach().double().reshape(()) * counts
        return loss * (counts * self.factor())

    def denominator(self, sum_over_ranks: Callable[[float], float]) -> float | None:
        """The weight of the global batch, if the loop weighs; None: losses were divided by it already."""
        if not self._weighed_by_loop:
            return None
        total = sum_over_ranks(self._own_weight)
        if total <= 0:
            raise UserCodeError(f"step {self.work.step}: all weights of the global batch are 0; give one sample weight")
        return total

    def conclude(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def outcome(self) -> Outcome:
        assert self._outcome is not None, "`leave` saw the last step()"
        return self._outcome


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and then every module as it was."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training
