"""`python -m benchmarks.checkpoint`: what a save holds up, beside a blocking `torch.save` and fsync of the same state.

Both are called in turn on the live state of a training run. Steps go on while a background save writes, and their times
are compared with those of steps during which nothing is written.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import run
from shoal.bench.groups import slowest_rank
from shoal.bench.options import AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, result_folder, run_as_rank
from shoal.bench.report import Result, check, milliseconds, print_report
from shoal.bench.training_job import corpus_file, gpt_run_file, start_training, training_job
from shoal.comm.collective import Collective
from shoal.engine.loop import Job, take_step
from shoal.launcher.environment import Place
from shoal.state import targets_of

STALL = 0.10
"""The promised share of the blocking save."""
TOKENS = 256
QUIET_STEPS = 5


def checkpoint(
    saves: Annotated[int, typer.Option(help="Saves of each kind.", min=2)] = 10,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """What a save holds up, beside a blocking torch.save and fsync of the same state.

    Example: python -m benchmarks.checkpoint --saves 5
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, saves=saves))
        return
    result = on_ranks(["benchmarks.checkpoint", "--saves", str(saves)], processes=processes)
    print_report("checkpoint", result, as_json=as_json)


def measure(place: Place, *, saves: int) -> Result | None:
    """The row and its check; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder, shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-"))), result_folder()
        run_file = gpt_run_file(shared, corpus_file(folder), TOKENS * place.world_size)
        training = start_training(run_file, place, stack)
        job, world = training_job(training, shared, stack, shared_saves=True), training.run.mesh.world
        times: dict[str, list[float]] = {
            name: [] for name in ("torch_save", "stall", "quiet_step", "step_while_writing")
        }
        take_step(job)
        job.saver.prepare(job.state.tensors())
        for _ in range(saves):
            times["quiet_step"] += [_step_s(job) for _ in range(QUIET_STEPS)]
            blocking_s = _blocking_save_s(job, folder) if place.rank == 0 else 0.0
            times["torch_save"].append(slowest_rank(blocking_s, world))
            times["stall"].append(slowest_rank(_background_save_s(job), world))
            times["step_while_writing"] += _steps_until_saved(job, world)
        state_bytes = sum(part.tensor.nbytes for held in job.state.tensors().values() for part in targets_of(held))
        return _result(times, state_bytes, place.world_size) if place.rank == 0 else None


def _blocking_save_s(job: Job, folder: Path) -> float:
    """What a script does: the state to one file, flushed to the disk."""
    begin_s = time.perf_counter()
    with open(folder / "state.pt", "wb") as file:
        torch.save({"tensors": job.state.tensors(), "state": job.state.to_json()}, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin_s


def _background_save_s(job: Job) -> float:
    return job.saver.save(job.progress.step, job.state.tensors(), job.state.to_json(), **job.origin)


def _steps_until_saved(job: Job, world: Collective) -> list[float]:
    """Seconds of steps as long as any rank still writes; at least one."""
    times, written, done = [], False, False
    while not done:
        times.append(_step_s(job))
        written = written or bool(job.saver.poll())  # ranks learn of it in different steps, each once
        done = slowest_rank(0.0 if written else 1.0, world) == 0.0
    return times


def _step_s(job: Job) -> float:
    begin_s = time.perf_counter()
    take_step(job)
    return time.perf_counter() - begin_s


def _result(times: dict[str, list[float]], state_bytes: int, ranks: int) -> Result:
    stall = statistics.median(times["stall"]) / statistics.median(times["torch_save"])
    slowdown = statistics.median(times["step_while_writing"]) / statistics.median(times["quiet_step"])
    row = {
        "state_bytes": state_bytes,
        "ranks": ranks,
        "saves": len(times["stall"]),
        **milliseconds(times),
        "stall_ratio": round(stall, 4),
        "steps_while_writing": len(times["step_while_writing"]),
        "slowdown_while_writing": round(slowdown, 3),
    }
    name = "stall of a save against torch.save and fsync"
    return {"rows": [row], "checks": [check(name, stall, STALL, at_most=True)]}


if __name__ == "__main__":
    run(checkpoint)
