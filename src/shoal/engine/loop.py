"""The loop: `steps` gives one step after the other to whoever takes it, and does what is due after each.

    for pending in steps(job):
        pending.result = ...        # from pending.microbatches to new weights

`train` takes them by `job.step`; a user's own loop in its own way (`shoal.own_loop.loop`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from shoal.checkpoint.save import Saver, SaveReport
from shoal.comm.collective import Collective
from shoal.data.feed import FedStep
from shoal.data.sample import Batch
from shoal.engine.measure import LayerNorms, Noted, ReplicaSpeeds, measurements
from shoal.engine.recovery import NonfiniteGuard
from shoal.engine.save_policy import EverySteps, LastSave, SaveInterval
from shoal.engine.state import Progress, TrainState
from shoal.engine.step import TrainStep
from shoal.engine.tally import StepResult
from shoal.engine.updates import OnGradients
from shoal.errors import EnvironmentFault, Stopped, UserCodeError
from shoal.observe.device_use import DeviceUse
from shoal.observe.goodput import RATE, Scaling
from shoal.observe.sink import EVALUATING, Sinks

# Hooks: a user's functions, called after each step, evaluation and save with a small read-only record.
#
# A hook after a step or an evaluation may return more measurements, by name; they are recorded beside Shoal's own.
# Hooks run on every rank, between two steps: what they do is time in which the rank does not train.


@dataclass(frozen=True)
class HookRecord:
    """What a hook is told: the step just done, this rank, and `values`, the measurements by name (none after a save).

    `model` is this rank's part of the model, to look at. Under ZeRO-3 its parameters are pieces.
    """

    step: int
    rank: int
    values: Mapping[str, float]
    model: nn.Module


Hook = Callable[[HookRecord], Mapping[str, float] | None]


@dataclass(frozen=True)
class Hooks:
    """The hooks of a run: names in the run file, and the functions; `users_traceback` shows an error."""

    rank: int = 0
    model: nn.Module = field(default_factory=nn.Identity)
    after_step: Sequence[tuple[str, Hook]] = ()
    after_evaluation: Sequence[tuple[str, Hook]] = ()
    after_save: Sequence[tuple[str, Hook]] = ()
    users_traceback: Callable[[BaseException], str] = str

    def stepped(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """`values` and what the hooks measured. Raises `UserCodeError` for a hook that raises or gives no numbers."""
        return self._call("after_step", self.after_step, step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """The same after an evaluation."""
        return self._call("after_evaluation", self.after_evaluation, step, values)

    def saved(self, step: int) -> None:
        """The checkpoint of `step` counts now."""
        self._call("after_save", self.after_save, step, {})

    def _call(
        self, key: str, hooks: Sequence[tuple[str, Hook]], step: int, values: Mapping[str, float]
    ) -> dict[str, float]:
        found = dict(values)
        for name, hook in hooks:
            where = f"hooks.{key}: {name} at step {step}"
            try:
                more = hook(HookRecord(step, self.rank, MappingProxyType(dict(found)), self.model))
            except Exception as error:
                raise UserCodeError(f"{where} raised:\n{self.users_traceback(error)}") from None
            found |= _numbers(more, where, found)
        return found


def _numbers(more: Any, where: str, taken: Mapping[str, float]) -> dict[str, float]:
    if more is None:
        return {}
    if not isinstance(more, Mapping):
        raise UserCodeError(f"{where} returned a {type(more).__name__}; return None or a mapping of names to numbers")
    found = {}
    for name, value in more.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise UserCodeError(f"{where} returned {name!r}: a {type(value).__name__}; it must be a number") from None
        if str(name) in taken:
            raise UserCodeError(f"{where} returned {name!r}, which is measured already; give it another name")
    return found


FIRST_COMPARED, COMPARED_EVERY = (2, 10), 100
"""Steps after which copies are compared by default, besides those whose weights are shown: a script's mistake shows in
its first steps, what comes later within a hundred.
"""


@dataclass(frozen=True)
class Cadence:
    """The last step, and every how many steps something is due (0: at the end alone).

    `loads_every`: records of every expert's load by this rank; 0: never. `compare_every`: comparisons of the copies
    that ranks hold; 0: never, None: before every save and evaluation, at `FIRST_COMPARED` and every `COMPARED_EVERY`
    steps.
    """

    steps: int
    evaluate_every: int = 0
    loads_every: int = 0
    compare_every: int | None = 0

    def due(self, every: int, step: int) -> bool:
        """At every multiple of `every` and at the last step."""
        return step == self.steps or (every > 0 and step % every == 0)

    def compares(self, step: int, *, shown: bool) -> bool:
        """Whether copies are compared at `step`; `shown`: its weights are saved or evaluated."""
        if self.compare_every is None:
            return shown or step in FIRST_COMPARED or step % COMPARED_EVERY == 0
        return self.compare_every > 0 and self.due(self.compare_every, step)


class StepFeed(Protocol):
    """What steps are taken from."""

    def next(self) -> FedStep: ...


@dataclass(frozen=True)
class Job:
    """The parts of one run on one rank. Everything is an argument: the loop fetches nothing.

    `rate` gives the learning rate of a step (None: the optimizer has its own); `evaluate` is None where there is no
    held-out data, or the script evaluates; `origin` is what a checkpoint records about its writer (layout, generation).
    `world` are all ranks, which end together. `saves` says after which steps a checkpoint is due, beside the last, and
    `last_save` measures how far apart they are. `figures`: more measurements of the step just taken. `compare`: raises
    where copies of the state differ. `speeds`: those of the replicas; None: there is one alone. `leaves` is asked
    after every step, on all ranks alike: the generation ends here. `carried_over`: the state is that of a generation
    before, not of a checkpoint. `layer_norms` measures the gradient layer by layer, `scaling` the speed-up against one
    rank, where they are asked for; `device_use` how well the device is used.
    """

    state: TrainState
    step: TrainStep
    feed: StepFeed
    guard: NonfiniteGuard
    saver: Saver
    sinks: Sinks
    cadence: Cadence
    rate: Callable[[int], float | None]
    evaluate: Callable[[], Mapping[str, float]] | None
    stop_requested: Callable[[], bool]
    origin: Mapping[str, Any]
    world: Collective
    figures: Callable[[], Mapping[str, float]] | None = None
    compare: Callable[[], None] | None = None
    speeds: ReplicaSpeeds | None = None
    hooks: Hooks = field(default_factory=Hooks)
    saves: SaveInterval = field(default_factory=lambda: EverySteps(0))
    last_save: LastSave = field(default_factory=LastSave)
    leaves: Callable[[StepResult], bool] | None = None
    carried_over: bool = False
    layer_norms: LayerNorms | None = None
    scaling: Scaling | None = None
    device_use: DeviceUse | None = None

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.state.progress


@dataclass
class PendingStep:
    """Step `number` on this rank's `microbatches` of the `samples` of all ranks, at the learning rate `lr`. `stop`:
    this rank was told to stop.

    Whoever takes it sets `result`, `lr` if it is None (the rate that the optimizer had), and on every rank `save` for a
    checkpoint after this step. `on_gradients` measures the agreed gradient where that is due: `TrainStep` calls it.
    """

    number: int
    microbatches: Sequence[Batch]
    samples: int
    lr: float | None
    stop: bool
    on_gradients: OnGradients | None = None
    result: StepResult | None = None
    save: bool = False

    def taken_by(self, step: TrainStep) -> StepResult:
        """What `step` makes of it. Raises what that does."""
        return step(
            self.number,
            self.microbatches,
            samples=self.samples,
            lr=self.lr,
            stop=self.stop,
            on_gradients=self.on_gradients,
        )


def train(job: Job) -> None:
    """Takes the steps by `job.step`, to the last one. Raises what `steps` does."""
    for pending in steps(job):
        pending.result = pending.taken_by(job.step)


def steps(job: Job) -> Iterator[PendingStep]:
    """Every step to the last one, or until evaluations have stopped improving (`run.stop_when`), each with what is due
    after it: measurements, evaluation, checkpoint.

    Raises `Stopped` after a signal and a good checkpoint, `Diverged` if it is hopeless, `VerificationFailed` where
    copies of the state differ. Ends where the job leaves.
    """
    stall_s, cadence, first = 0.0, job.cadence, job.progress.step
    evaluating = saving = comparing = False
    job.last_save.begin(first)
    watch = job.state.watch
    if watch.missed(first, due=first > 0 and cadence.due(cadence.evaluate_every, first)):
        _evaluate(job)  # the stop came before it
    while job.progress.step < cadence.steps and watch.over is None:
        taken = yield from _one_step(job, stall_s)
        result, step, stall_s = _result(taken), job.progress.step, 0.0
        evaluating |= cadence.due(cadence.evaluate_every, step)
        saving |= taken.save or step == cadence.steps or job.saves.due(step)
        comparing |= cadence.compares(step, shown=evaluating or saving)
        tell_of_saves(job, job.saver.poll())
        leaving = job.leaves is not None and job.leaves(result)
        if result.agreed is None:
            continue  # replicas differ: what needs the one model waits
        stopping = result.agreed.stop and step < cadence.steps and not leaving
        if comparing or (stopping and cadence.compares(step, shown=True)):
            _compare(job)
        if evaluating and not stopping:
            saving |= _evaluate(job) or watch.over is not None
        if saving or stopping:
            stall_s = _save(job)
            if not stopping and step < cadence.steps:
                job.saves.saved(step, stall_s=stall_s)
        evaluating = saving = comparing = False
        if leaving:
            return
        if stopping:
            break
    if job.carried_over and first >= cadence.steps:  # whoever took the last step was lost before it was saved
        _compare(job)
        _evaluate(job)
        _save(job)
        first -= 1
    _end(job, first)


def take_step(job: Job) -> StepResult:
    """One step by `job.step`, and nothing after it."""
    pending = next(taken := _one_step(job, 0.0))
    pending.result = pending.taken_by(job.step)
    for _ in taken:
        raise AssertionError("one step was asked for")
    return pending.result


def _one_step(job: Job, stall_s: float) -> Generator[PendingStep, None, PendingStep]:
    """One step from its data to its measurements. The save that delayed it by `stall_s` counts in its time."""
    begin_s = time.perf_counter() - stall_s
    number = job.progress.step + 1
    fed = job.feed.next()
    measure = None if job.layer_norms is None else job.layer_norms.due(number)
    pending = PendingStep(number, fed.microbatches, len(fed.interval), job.rate(number), job.stop_requested(), measure)
    yield pending
    result = _result(pending)
    tokens = 0 if result.agreed is None else result.agreed.tokens
    job.progress.advance(fed.interval, tokens=tokens, committed=result.committed)
    if job.speeds is not None:
        _note_speed(job.speeds, result, fed)
    if result.skipped:
        return pending  # there is nothing to measure
    step_s = time.perf_counter() - begin_s
    _record(job, result, fed, lr=pending.lr or 0.0, step_s=step_s, stall_s=stall_s)
    for sentence in fed.skipped:
        job.sinks.warn(f"left out: {sentence}")
    real = [batch for batch in fed.microbatches if batch.real_samples]
    job.guard.check(number, result, real, warn=job.sinks.warn)
    return pending


def _result(taken: PendingStep) -> StepResult:
    assert taken.result is not None, "whoever takes a step sets its result"
    return taken.result


def _note_speed(speeds: ReplicaSpeeds, result: StepResult, fed: FedStep) -> None:
    if not result.skipped:
        samples = sum(batch.real_samples for batch in fed.microbatches)
        speeds.took(Noted(samples, result.times.forward_backward_s))
    speeds.after_step(agreed=result.agreed is not None)


def _record(job: Job, result: StepResult, fed: FedStep, *, lr: float, step_s: float, stall_s: float) -> None:
    cadence, progress, context = job.cadence, job.progress, job.step.context
    values = measurements(
        result,
        progress,
        context.mixtures,
        lr=lr,
        data_s=fed.wait_s,
        step_s=step_s,
        stall_s=stall_s,
        device=context.device,
        with_loads=cadence.loads_every > 0 and cadence.due(cadence.loads_every, progress.step),
    )
    if fed.skipped:
        values["samples/skipped"] = len(fed.skipped)
    if job.figures is not None:
        values |= job.figures()
    if job.speeds is not None:
        values |= job.speeds.figures()
    if job.layer_norms is not None:
        values |= job.layer_norms.take_figures()
    if job.scaling is not None:
        values |= job.scaling.figures(values[RATE])
    if job.device_use is not None:
        values |= job.device_use.figures(values, samples=result.tally.samples, now_s=time.monotonic())
    values |= job.last_save.take_figures()
    values = job.hooks.stepped(progress.step, values)
    job.sinks.record(progress.step, values, time_s=time.time())


def _save(job: Job) -> float:
    """Seconds that training stood still for it: until its numbers are there, laid open for a checkpoint, and copied."""
    begin_s = time.perf_counter()
    job.step.settle()
    job.last_save.saved(job.progress.step)
    job.saver.save(job.progress.step, job.state.tensors(), job.state.to_json(), **job.origin)
    return time.perf_counter() - begin_s


def _compare(job: Job) -> None:
    job.step.settle()
    if job.compare is not None:
        job.compare()


def _evaluate(job: Job) -> bool:
    """Whether the weights are the best so far, and are to be kept."""
    job.step.settle()
    measured: Mapping[str, float] = {}
    if job.evaluate is not None:
        job.sinks.activity(EVALUATING)
        measured = job.evaluate()
        job.sinks.activity("")
    values = job.hooks.evaluated(job.progress.step, measured)
    if values:
        job.sinks.record(job.progress.step, values, time_s=time.time())
    return job.state.watch.active and job.state.watch.note(job.progress.step, measured)


def tell_of_saves(job: Job, reports: Sequence[SaveReport]) -> None:
    """Says what went wrong with finished saves, without which training goes on; tells hooks of those that count, whose
    figures are recorded with the next step, or by `record_last_save`.
    """
    for report in reports:
        job.saves.wrote(report.seconds)
        if report.committed:
            job.last_save.wrote(report)
            job.hooks.saved(report.step)
        if report.error is not None:
            job.sinks.warn(report.error)


def record_last_save(job: Job) -> None:
    """Records what the last save wrote, if it counts, where no step follows it."""
    figures = job.last_save.take_figures()
    if "checkpoint/saved_step" in figures:
        job.sinks.record(job.progress.step, figures, time_s=time.time())


def _end(job: Job, first: int) -> None:
    """Waits for the last save, and for every rank to know of it: a rank that left earlier would take the exchange
    along.

    `first`: the step that the loop began with.
    """
    if job.progress.step > first:
        job.sinks.activity(f"waiting until the checkpoint of step {job.progress.step} is written")
    reports = job.saver.wait()
    tell_of_saves(job, reports)
    record_last_save(job)
    job.world.barrier().wait()
    step = job.progress.step
    if step > first and not any(report.committed and report.step == step for report in reports):
        raise EnvironmentFault(
            f"step {step} was reached, but its checkpoint could not be written; the warnings say why"
        )
    if (why := job.state.watch.over) is not None:
        job.sinks.note(why)
    elif step < job.cadence.steps:
        raise Stopped(f"stopped at step {step} by a signal, after a good checkpoint; the same command resumes from it")
