"""The loop. It reads from top to bottom; what it calls knows nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint.save import Saver, SaveReport
from shoal.data.feed import FedStep, Feed
from shoal.engine.measure import measurements
from shoal.engine.recovery import NonfiniteGuard
from shoal.engine.state import TrainState
from shoal.engine.step import StepResult, TrainStep
from shoal.errors import EnvironmentFault, Stopped
from shoal.observe.display import Display
from shoal.observe.events import EventWriter

CHECKPOINT_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Job:
    """The parts of one run on one rank. Everything is an argument: the loop fetches nothing."""

    state: TrainState
    step: TrainStep
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
    steps: int
    evaluate_every: int
    save_every: int


def train(job: Job) -> None:
    """Runs to the last step. Raises `Stopped` after a signal and a good checkpoint, `Diverged` where it is no use."""
    stall_s = 0.0
    while job.state.step < job.steps:
        result = take_step(job, stall_s)
        number = job.state.step
        stopping = result.tally.stop and number < job.steps
        if _due(job.evaluate_every, number, job.steps) and not stopping:
            _evaluate(job)
        saving = stopping or _due(job.save_every, number, job.steps)
        stall_s = _save(job) if saving else 0.0
        _report_saves(job, job.saver.poll())
        if stopping:
            _stop(job)
    _finish_saves(job)


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
        result, job.state, lr=lr, data_s=data_s, step_s=step_s, stall_s=stall_s, device=job.step.device
    )
    job.events.write(job.state.step, values, time_s=time.time())
    job.display.step(job.state.step, values)


def _save(job: Job) -> float:
    return job.saver.save(
        job.state.step, job.state.tensors(), job.state.to_json(), layout=job.layout, generation=job.generation
    )


def _evaluate(job: Job) -> None:
    values = job.evaluate()
    if values:
        job.events.write(job.state.step, values, time_s=time.time())
        job.display.step(job.state.step, values)


def _report_saves(job: Job, reports: list[SaveReport]) -> bool:
    """Tells of finished saves; whether the checkpoint of the newest step is among them, and good."""
    for report in reports:
        if report.error is not None:
            job.display.warn(f"{report.error}; training goes on")
    return any(report.committed and report.step == job.state.step for report in reports)


def _finish_saves(job: Job) -> bool:
    """Waits until every rank knows what became of its save: whoever leaves earlier takes the exchange along."""
    saved = _report_saves(job, job.saver.wait(CHECKPOINT_TIMEOUT_S))
    job.step.group.barrier().wait()
    return saved


def _stop(job: Job) -> None:
    if not _finish_saves(job):
        raise EnvironmentFault(f"stopped at step {job.state.step} by a signal, but its checkpoint could not be written")
    raise Stopped(
        f"stopped at step {job.state.step} by a signal, after a good checkpoint; the same command goes on from it"
    )
