"""`shoal bench checkpoint`: what a save holds up, beside a blocking `torch.save` and fsync of the same state.

Both are called in turn on the live state of a training run. While a background save writes, steps go on, and their
times are compared with those of quiet steps.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shoal.engine.loop import Job, take_step
from shoal.launch.environment import Place
from shoal.launch.store_exchange import StoreExchange
from shoal.recipes.benchmarks.gpt_job import corpus_file, gpt_job, gpt_run_file
from shoal.recipes.benchmarks.machine import result_folder
from shoal.recipes.benchmarks.paired import check, milliseconds
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import set_up
from shoal.state.target import targets_of

STALL = 0.10
TOKENS = 256
QUIET_STEPS = 5


def measure(place: Place, *, saves: int) -> dict[str, Any] | None:
    """The row and its checks; None on all ranks but the first."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        shared = result_folder()
        setting = set_up(gpt_run_file(shared, corpus_file(folder), TOKENS * place.world_size), place, UserObjects())
        job = gpt_job(setting, shared, stack, exchange=StoreExchange(setting.store), ranks=place.world_size)
        times: dict[str, list[float]] = {
            name: [] for name in ("torch_save", "stall", "quiet_step", "step_while_writing")
        }
        take_step(job)
        job.saver.prepare(job.state.tensors())
        for _ in range(saves):
            times["quiet_step"] += [_timed_step(job) for _ in range(QUIET_STEPS)]
            times["torch_save"].append(_slowest(job, _blocking_save(job, folder) if place.rank == 0 else 0.0))
            times["stall"].append(_slowest(job, _background_save(job)))
            times["step_while_writing"] += _steps_until_saved(job)
        state_bytes = sum(part.tensor.nbytes for held in job.state.tensors().values() for part in targets_of(held))
        return _row(times, state_bytes, place.world_size) if place.rank == 0 else None


def _blocking_save(job: Job, folder: Path) -> float:
    """What a script does: the state to one file, flushed to the disk."""
    begin_s = time.perf_counter()
    with open(folder / "state.pt", "wb") as file:
        torch.save({"tensors": job.state.tensors(), "state": job.state.to_json()}, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin_s


def _background_save(job: Job) -> float:
    return job.saver.save(job.state.step, job.state.tensors(), job.state.to_json(), layout=job.layout)


def _steps_until_saved(job: Job) -> list[float]:
    """Steps as long as any rank still writes; at least one."""
    times, written, done = [], False, False
    while not done:
        times.append(_timed_step(job))
        written = written or bool(job.saver.poll())  # ranks hear of it in different steps, each once
        done = _slowest(job, 0.0 if written else 1.0) == 0.0
    return times


def _timed_step(job: Job) -> float:
    begin_s = time.perf_counter()
    take_step(job)
    return time.perf_counter() - begin_s


def _slowest(job: Job, value: float) -> float:
    """The largest `value` of all ranks."""
    largest = torch.tensor([value], dtype=torch.float64)
    job.step.context.group.all_reduce(largest, "max").wait()
    return float(largest)


def _row(times: dict[str, list[float]], state_bytes: int, ranks: int) -> dict[str, Any]:
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
    return {"row": row, "checks": [check("stall of a save against torch.save and fsync", stall, STALL, at_most=True)]}
