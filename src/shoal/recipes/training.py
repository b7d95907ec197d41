"""One rank of `shoal train`: from its setting to the finished report."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.save import Saver
from shoal.config.load import dumps
from shoal.engine.loop import Job, train
from shoal.engine.recovery import NonfiniteGuard
from shoal.engine.resume import load_weights, resume
from shoal.engine.state import TrainState
from shoal.errors import ConfigError, Diverged, Stopped
from shoal.launch.environment import Place
from shoal.launch.signals import StopRequest
from shoal.launch.store_exchange import StoreExchange
from shoal.observe.display import Display, LoggedDisplay, display_for
from shoal.observe.events import EventWriter
from shoal.observe.facts import replace_file, write_facts
from shoal.observe.logs import close_log, open_log
from shoal.observe.report import write_report
from shoal.optim.schedule import peak_rate, rate
from shoal.planning.prediction import prediction_facts, remember_run
from shoal.recipes.assembly import new_feed, new_state, new_step, new_sync
from shoal.recipes.facts import run_facts
from shoal.recipes.objects import Given
from shoal.recipes.sampling import sample_text, unsplit_model
from shoal.recipes.setting import Setting, set_up
from shoal.runfile.run_file import RunFile, run_directory
from shoal.sync.strategy import Sync


def train_rank(run_file: RunFile, place: Place, given: Given) -> None:
    """Trains to the end of the run file. Raises what `shoal.errors` draws; the run directory stays whole."""
    directory = run_directory(run_file)
    with ExitStack() as stack:
        log = open_log(directory, rank=place.rank, to_terminal=False)
        stack.callback(close_log, log)
        terminal = display_for(sys.stdout, place.rank, plain=None if run_file.observe.live else True)
        display = LoggedDisplay(terminal, log)
        setting = set_up(run_file, place, given)
        sync = new_sync(setting)
        state = new_state(setting, sync)
        peak, said = peak_rate(run_file.optimizer, global_samples=run_file.batch.global_samples)
        came_from = _restore(state, setting, directory, display)
        generation = setting.mesh.generation
        if place.rank == 0:
            replace_file(directory / "run.toml", dumps(run_file).encode())
            write_facts(directory, run_facts(setting, generation=generation) | _predicted(setting))
        _introduce(display, setting, came_from, said)
        stop = stack.enter_context(StopRequest())  # until here there is nothing to save: a signal ends the rank
        job = _job(setting, state, sync, directory, display, stop, stack, peak=peak, generation=generation)
        if came_from is not None:
            job.events.resume(came_from, time_s=time.time())
        setting.mesh.ledger.take()  # what the start sent belongs to no step
        display.start(run_file.run.name, run_file.run.steps, first_step=state.step + 1)
        stack.callback(display.finish)
        _train(job, directory, place)
        job.saver.close()
        display.finish()
        if place.rank == 0:
            _conclude(setting, given, directory, display, trained=state.step > job.came_from)


def _train(job: Job, directory: Path, place: Place) -> None:
    """Where it raises, no save is waited for: another rank may be gone."""
    try:
        train(job)
    except (Stopped, Diverged) as end:
        if place.rank == 0:
            write_facts(directory, {"state": type(end).__name__.lower()})
        raise


def _job(
    setting: Setting, state: TrainState, sync: Sync, directory: Path, display: Display, stop: StopRequest,
    stack: ExitStack, *, peak: float, generation: int,
) -> Job:  # fmt: skip
    run_file, mesh = setting.run_file, setting.mesh
    saver = Saver(
        directory,
        rank=mesh.rank,
        world_size=mesh.layout.world_size,
        exchange=StoreExchange(setting.store),
        keep=run_file.checkpoint.keep,
        object_bytes=run_file.checkpoint.object_bytes,
        split=mesh.layout.replica_size > 1,
    )
    step = new_step(setting, state, sync)
    return Job(
        state=state,
        step=step,
        feed=stack.enter_context(new_feed(setting, state.cursor)),
        guard=NonfiniteGuard(run_file.run.nonfinite_limit, step, mesh.world, forward=mesh.layout.replica_size == 1),
        saver=saver,
        events=stack.enter_context(EventWriter(directory, rank=mesh.rank, generation=generation, warn=display.warn)),
        display=display,
        rate=lambda number: rate(run_file.schedule, peak, step=number, steps=run_file.run.steps),
        evaluate=setting.evaluate,
        stop_requested=lambda: stop.requested,
        layout=mesh.layout.to_dict(),
        generation=generation,
        came_from=state.step,
        steps=run_file.run.steps,
        evaluate_every=run_file.observe.evaluate_every_steps,
        save_every=run_file.checkpoint.every_steps,
        loads_every=_loads_every(setting),
    )


def _loads_every(setting: Setting) -> int:
    """Of the ranks that hold the same layers, the first tells how loaded their experts are."""
    first = setting.mesh.axis("replicate", "shard", "context", "tensor").rank == 0
    return setting.run_file.observe.expert_loads_every_steps if first else 0


def _restore(state: TrainState, setting: Setting, directory: Path, display: Display) -> int | None:
    """The step that the run goes on from; None for a fresh start, with the weights of a warm start where given."""
    step = resume(state, directory, announce=setting.announce, warn=display.warn)
    source = setting.run_file.run.warm_start
    if step is None and source is not None:
        display.note(f"weights from step {load_weights(state, Path(source), announce=setting.announce)} of {source}")
    return step


def _introduce(display: Display, setting: Setting, came_from: int | None, scaling: str | None) -> None:
    count = sum(prod(shape) for shape in setting.parts.split.shapes.values())
    display.note(f"{setting.mesh.layout.describe()} on {setting.device.type}, {count:,} parameters, "
                 f"{len(setting.data.train):,} training samples")  # fmt: skip
    if setting.mesh.layout.world_size > 1:
        display.note(setting.mesh.world.wire)
    table = setting.parts.table
    if table is not None and not table.flushes:
        display.note(
            f"PipeDream: {table.microbatches} updates a step, from weights up to {table.stages - 1} updates old"
        )
    if scaling is not None:
        display.note(scaling)
    if came_from is not None:
        display.note(f"going on from the checkpoint of step {came_from}")
    if came_from is not None and came_from >= setting.run_file.run.steps:
        display.warn(f"run.steps = {setting.run_file.run.steps} are done already: nothing to train; raise it to go on")


def _sampled(setting: Setting, given: Given, display: Display) -> str | None:
    """Text from the model; a model that gives none is no reason to end a finished run with an error."""
    observe = setting.run_file.observe
    try:
        model = unsplit_model(setting, given)
        return sample_text(setting, model, observe.sample_prompt, observe.sample_bytes)
    except ConfigError as error:
        display.warn(str(error))
        return None


def _predicted(setting: Setting) -> dict[str, Any]:
    """What the run is expected to take."""
    place = setting.place
    return prediction_facts(
        setting.run_file,
        device=setting.device.type,
        one_host=place.one_host,
        threads=torch.get_num_threads(),
        environ=os.environ,
    )


def _conclude(setting: Setting, given: Given, directory: Path, display: Display, *, trained: bool) -> None:
    """What rank 0 does when training is over: text from the model, the bigram beside the loss, the report.

    `trained`: this life took steps, so that its prediction can be held against them.
    """
    observe = setting.run_file.observe
    text = _sampled(setting, given, display) if observe.sample_bytes else None
    if text is not None:
        write_facts(
            directory,
            {"samples": [{"step": setting.run_file.run.steps, "prompt": observe.sample_prompt, "text": text}]},
        )
        display.note(f"the model continues {observe.sample_prompt!r}:\n{observe.sample_prompt}{text}")
    baseline = setting.data.facts.get("baseline/bigram_nats_per_byte")
    if baseline is not None:
        display.note(f"a bigram model of the same split reaches {baseline:.3f} nats/byte")
    if trained:
        remember_run(directory, os.environ)
    if observe.report:
        display.note(f"report: {write_report(directory)}")
