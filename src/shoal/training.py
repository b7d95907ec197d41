"""One rank of `shoal train`: from its run to the finished report."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.assembly.conclusion import conclude, stopping_when_preempted
from shoal.assembly.hang_watch import watch_hangs
from shoal.assembly.job import build_job, introduce, restore, run_start, sinks_of
from shoal.assembly.objects import UserObjects
from shoal.assembly.profiling import profiled
from shoal.assembly.run import Run, open_run
from shoal.assembly.run_record import check_replay, rounds_of, run_facts, write_run_file
from shoal.engine.loop import train
from shoal.errors import ConfigError
from shoal.launcher.environment import Place
from shoal.launcher.signals import StopRequest, end_with
from shoal.observe.facts import write_facts
from shoal.observe.prediction import Forecast
from shoal.runfile.run_file import RunFile, run_directory


def train_rank(
    run_file: RunFile,
    place: Place,
    objects: UserObjects,
    *,
    forecast: Forecast | None = None,
    replay: Path | None = None,
) -> None:
    """Trains to the end of the run file. Raises the errors of `shoal.errors`; the run directory stays whole.

    `replay`: the directory of a run whose order of events at servers is repeated; at the end, weights are compared.
    """
    if run_file.elastic is not None:
        from shoal.elastic.replica import train_replica

        train_replica(run_file, place, objects, forecast=forecast)
        return
    directory = run_directory(run_file)
    with ExitStack() as last:
        with sinks_of(run_file, place) as sinks, ExitStack() as stack:
            rounds = rounds_of(run_file, place.rank, directory, replay)
            run = open_run(run_file, place, objects, rounds=rounds, activity=sinks.activity)
            stack.enter_context(run.default_group())
            resumed_step = restore(run, directory, sinks)
            if replay is not None and resumed_step is not None:
                raise ConfigError(f"{directory} holds an earlier replay: remove it, and replay again")
            if rounds is not None:
                rounds.resume(resumed_step or 0)
            if place.rank == 0:
                write_run_file(run, directory, sinks)
                write_facts(directory, run_facts(run) | _predicted(run, forecast))
            introduce(sinks, run, resumed_step)
            # Until here there is nothing to save: a signal ends the rank. It is noted until the report is written.
            stop = last.enter_context(StopRequest())
            job = build_job(run, directory, sinks, stack, stop_requested=lambda: stop.requested)
            job = replace(job, feed=profiled(run, job.feed))
            first = job.progress.step
            run.mesh.ledger.take()  # what the start sent belongs to no step
            sinks.start(run_start(run))
            stack.enter_context(watch_hangs(run, directory, say=sinks.warn))
            stack.enter_context(stopping_when_preempted(run, stop, say=sinks.warn))
            train(job)  # if it raises, no save is waited for: another rank may be gone
            run.settle()
            job.saver.close()
            if place.rank == 0:
                conclude(run, directory, sinks, forecast if job.progress.step > first else None)
                if replay is not None:
                    sinks.note(check_replay(replay, directory))
        if place.launcher == "shoal":  # the process was made for this; under others a script may go on
            end_with(0)  # while the request for a stop is still noted: no moment is left for another code


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
