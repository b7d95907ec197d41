"""The loop. It reads from top to bottom; what it calls knows nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint.save import Saver, SaveReport
from shoal.data.feed import FedStep, Feed
from shoal.engine.measure import measurements
from shoal.engine.recovery import NonfiniteGuard
from shoal.engine.state import TrainState
from shoal.engine.step_protocol import Step
from shoal.engine.step_result import StepResult
from shoal.errors import EnvironmentFault, Stopped
from shoal.observe.display import Display
from shoal.observe.events import EventWriter

CHECKPOINT_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Job:
    """The parts of one run on one rank. Everything is an argument: the loop fetches nothing.

    `loads_every`: steps between two records of every expert's load by this rank; 0: never.
    """

    state: TrainState
    step: Step
    feed: Feed
    guard: NonfiniteGuard
    saver: Saver
    events: EventWriter
    display: Display
    rate: Callable[[int], float]
    evaluate: Callable[[], Mapping[str, float]]
    stop_requested: Callable[[], bool]
    layout: Mapping[str, Any]
    generation: int
    came_from: int
    steps: int
    evaluate_every: int
    save_every: int
    loads_every: int = 0


def train(job: Job) -> None:
    """Runs to the last step. Raises `Stopped` after a signal and a good checkpoint, `Diverged` where it is no use."""
    stall_s = 0.0
    while job.state.step < job.steps:
        result = take_step(job, stall_s)
        number = job.state.step
        stopping = result.tally.stop and number < job.steps
        if _due(job.evaluate_every, number, job.steps) and not stopping:
            _evaluate(job)
        _tell(job, job.saver.poll())
        saving = stopping or _due(job.save_every, number, job.steps)
        stall_s = _save(job) if saving else 0.0
        if stopping:
            break
    _end(job)


def take_step(job: Job, stall_s: float = 0.0) -> StepResult:
    """One step from its data to its measurements. It pays for the save that held it up by `stall_s`."""
    begin_s = time.perf_counter() - stall_s
    number, lr = job.state.step + 1, job.rate(job.state.step + 1)
    fed = job.feed.next()
    result = job.step(number, fed.microbatches, lr=lr, stop=job.stop_requested())
    _advance(job.state, fed, result)
    step_s = time.perf_counter() - begin_s
    _record(job, result, lr=lr, data_s=fed.wait_s, step_s=step_s, stall_s=stall_s)
    job.guard.check(number, result, fed.microbatches, warn=job.display.warn)
    return result


def _due(every: int, number: int, last: int) -> bool:
    """At every multiple of `every` (0: never) and at the last step."""
    return number == last or (every > 0 and number % every == 0)


def _advance(state: TrainState, fed: FedStep, result: StepResult) -> None:
    """The step is taken, committed or skipped: its samples are used either way."""
    cursor, interval = state.cursor.lease(len(fed.interval))
    if interval != fed.interval:
        raise AssertionError(f"the feed gave positions {fed.interval}, the run's cursor stands at {interval}")
    state.cursor = cursor.commit(interval)
    state.step += 1
    state.samples += result.tally.samples
    state.tokens += result.tally.tokens
    state.skipped += not result.committed


def _record(job: Job, result: StepResult, *, lr: float, data_s: float, step_s: float, stall_s: float) -> None:
    values = measurements(
        result,
        job.state,
        lr=lr,
        data_s=data_s,
        step_s=step_s,
        stall_s=stall_s,
        device=job.step.context.device,
        with_loads=job.loads_every > 0 and _due(job.loads_every, job.state.step, job.steps),
    )
    job.events.write(job.state.step, values, time_s=time.time())
    job.display.step(job.state.step, values)


def _save(job: Job) -> float:
    job.step.sync.settle()
    return job.saver.save(
        job.state.step, job.state.tensors(), job.state.to_json(), layout=job.layout, generation=job.generation
    )


def _evaluate(job: Job) -> None:
    job.step.sync.settle()
    values = job.evaluate()
    if values:
        job.events.write(job.state.step, values, time_s=time.time())
        job.display.step(job.state.step, values)


def _tell(job: Job, reports: Sequence[SaveReport]) -> None:
    """Warns of what went wrong with saves that are over; training goes on without them."""
    for report in reports:
        if report.error is not None:
            job.display.warn(report.error)


def _end(job: Job) -> None:
    """Waits for the last save, and for every rank to know of it: who leaves earlier takes the exchange along."""
    reports = job.saver.wait(CHECKPOINT_TIMEOUT_S)
    _tell(job, reports)
    job.step.context.group.barrier().wait()
    step = job.state.step
    if step > job.came_from and not any(report.committed and report.step == step for report in reports):
        raise EnvironmentFault(
            f"step {step} was reached, but its checkpoint could not be written; the warnings say why"
        )
    if step < job.steps:
        raise Stopped(f"stopped at step {step} by a signal, after a good checkpoint; the same command goes on from it")
