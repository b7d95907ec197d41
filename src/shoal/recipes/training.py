"""One rank of `shoal train`: from its run to the finished report."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch

from shoal import units
from shoal.checkpoint.save import Saver
from shoal.comm.board import Board
from shoal.config.load import dumps
from shoal.engine.loop import Cadence, Job, train
from shoal.engine.recovery import NonfiniteGuard
from shoal.engine.resume import load_weights, resume
from shoal.errors import ConfigError
from shoal.launch.environment import Place
from shoal.launch.signals import StopRequest
from shoal.observe.facts import replace_file, write_facts
from shoal.observe.sink import RunStart, Sinks
from shoal.observe.sinks import open_sinks
from shoal.optim.schedule import peak_rate
from shoal.recipes.facts import run_facts
from shoal.recipes.forecast import Forecast
from shoal.recipes.objects import UserObjects
from shoal.recipes.run import Run, open_run
from shoal.recipes.sampling import sample_text, unsplit_model
from shoal.recipes.verification.passed import missing_proof
from shoal.runfile.run_file import RunFile, run_directory


def train_rank(run_file: RunFile, place: Place, objects: UserObjects, *, forecast: Forecast | None = None) -> None:
    """Trains to the end of the run file. Raises the errors of `shoal.errors`; the run directory stays whole."""
    directory = run_directory(run_file)
    sinks = open_sinks(
        run_file.observe,
        directory,
        rank=place.rank,
        stream=sys.stdout,
        reports_failure=place.launcher != "shoal",  # else the launcher does, which knows whose failure came first
    )
    with sinks, ExitStack() as stack:
        run = open_run(run_file, place, objects)
        resumed_step = _restore(run, directory, sinks)
        if place.rank == 0:
            replace_file(directory / "run.toml", dumps(run_file).encode())
            write_facts(directory, run_facts(run) | _predicted(run, forecast))
        _introduce(sinks, run, resumed_step)
        stop = stack.enter_context(StopRequest())  # until here there is nothing to save: a signal ends the rank
        job = _job(run, directory, sinks, stop, stack)
        first = job.progress.step
        run.mesh.ledger.take()  # what the start sent belongs to no step
        sinks.start(_start_of(run))
        train(job)  # if it raises, no save is waited for: another rank may be gone
        job.saver.close()
        if place.rank == 0:
            _conclude(run, directory, sinks, forecast if job.progress.step > first else None)


def _start_of(run: Run) -> RunStart:
    return RunStart(
        name=run.run_file.run.name,
        total_steps=run.run_file.run.steps,
        first_step=run.state.progress.step + 1,
        generation=run.mesh.generation,
        epoch_samples=len(run.workload.data.train),
    )


def _job(run: Run, directory: Path, sinks: Sinks, stop: StopRequest, stack: ExitStack) -> Job:
    run_file, mesh = run.run_file, run.mesh
    saver = Saver(
        directory,
        rank=mesh.rank,
        world_size=mesh.layout.world_size,
        exchange=Board(run.process.store, timeout_s=run.run_file.wire.timeout_s).clone(),
        keep=run_file.checkpoint.keep,
        object_bytes=run_file.checkpoint.object_bytes,
        split=mesh.layout.replica_size > 1
        or not run.generation.sync.keeps_replicas_equal
        or run.generation.coded is not None,
    )
    context, forward = run.step.context, mesh.layout.replica_size == 1
    return Job(
        state=run.state,
        step=run.step,
        feed=stack.enter_context(run.feed()),
        guard=NonfiniteGuard(run_file.run.nonfinite_limit, context, forward=forward),
        saver=saver,
        sinks=sinks,
        cadence=Cadence(
            run_file.run.steps,
            evaluate_every=run_file.observe.evaluate_every_steps,
            save_every=run_file.checkpoint.every_steps,
            loads_every=_loads_every(run),
        ),
        rate=run.rate,
        evaluate=run.evaluate,
        stop_requested=lambda: stop.requested,
        figures=None if run.generation.coded is None else run.generation.coded.take_figures,
        origin={"layout": mesh.layout.to_dict(), "generation": mesh.generation},
    )


def _loads_every(run: Run) -> int:
    """Of the ranks that hold the same layers, the first tells how loaded their experts are."""
    first = run.mesh.axis("replicate", "shard", "context", "tensor").rank == 0
    return run.run_file.observe.expert_loads_every_steps if first else 0


def _restore(run: Run, directory: Path, sinks: Sinks) -> int | None:
    """The step that the run goes on from; None for a fresh start, with the weights of a warm start if one is named."""
    step = resume(run.state, directory, announce=run.process.announce, warn=sinks.warn)
    source = run.run_file.run.warm_start
    if step is None and source is not None:
        loaded = load_weights(run.state, Path(source), announce=run.process.announce)
        sinks.note(f"weights from step {loaded} of {source}")
    return step


def _introduce(sinks: Sinks, run: Run, resumed_step: int | None) -> None:
    count = sum(prod(shape) for shape in run.generation.parts.split.shapes.values())
    sinks.note(f"{run.mesh.layout.describe()} on {run.device.type}, {count:,} parameters, "
                 f"{units.plural(len(run.workload.data.train), 'training sample')}")  # fmt: skip
    if run.mesh.layout.world_size > 1:
        sinks.note(run.mesh.world.wire)
    table = run.generation.parts.table
    if table is not None and not table.flushes:
        sinks.note(f"PipeDream: {table.microbatches} updates a step, from weights up to {table.stages - 1} updates old")
    _, scaling = peak_rate(run.run_file.optimizer, global_samples=run.run_file.batch.global_samples)
    if scaling is not None:
        sinks.note(scaling)
    unproved = missing_proof(run.run_file, run.generation.parts.split.shapes)
    if unproved is not None:
        sinks.note(unproved)
    if resumed_step is not None:
        sinks.note(f"going on from the checkpoint of step {resumed_step}")
    if resumed_step is not None and resumed_step >= run.run_file.run.steps:
        sinks.warn(f"run.steps = {run.run_file.run.steps} are done already: nothing to train; raise it to go on")


def _sampled(run: Run, sinks: Sinks) -> str | None:
    """Text from the model; a model that gives none is no reason to end a finished run with an error."""
    observe = run.run_file.observe
    try:
        return sample_text(run, unsplit_model(run), observe.sample_prompt, observe.sample_bytes)
    except ConfigError as error:
        sinks.warn(str(error))
        return None


def _predicted(run: Run, forecast: Forecast | None) -> dict[str, Any]:
    """What the run is expected to take."""
    if forecast is None:
        return {}
    return forecast.facts(
        run.run_file,
        device=run.device.type,
        one_host=run.process.place.one_host,
        threads=torch.get_num_threads(),
        environ=run.process.environ,
    )


def _conclude(run: Run, directory: Path, sinks: Sinks, forecast: Forecast | None) -> None:
    """What rank 0 does when training is over: text from the model, the bigram beside the loss.

    `forecast`: None if this start took no steps, and so measured nothing.
    """
    observe = run.run_file.observe
    text = _sampled(run, sinks) if observe.sample_bytes else None
    if text is not None:
        write_facts(
            directory,
            {"samples": [{"step": run.run_file.run.steps, "prompt": observe.sample_prompt, "text": text}]},
        )
        sinks.note(f"the model continues {observe.sample_prompt!r}:\n{observe.sample_prompt}{text}")
    baseline = run.workload.data.facts.get("baseline/bigram_nats_per_byte")
    if baseline is not None:
        sinks.note(f"a bigram model of the same split reaches {baseline:.3f} nats/byte")
    if forecast is not None:
        forecast.remember(directory, run.process.environ)
