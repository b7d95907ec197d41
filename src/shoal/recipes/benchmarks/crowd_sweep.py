"""What ranks that compute at the same time cost each other: the same step on all of them at once, none of whom talks.

Beyond their share of the cores they lose the caches, which are filled anew at each change of ranks, and the memory's
rate. Sweeps of single operators do not see that: their windows are as short as a time slice, and their data stay in
the caches meanwhile. So it is a step of a small GPT, over many slices, on the rank that takes longest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shoal.comm.collective import Collective
from shoal.data.config import BatchConfig, Tokens
from shoal.models.config import GPTConfig
from shoal.recipes.benchmarks.gpt_job import corpus_file
from shoal.recipes.benchmarks.host_sweep import solo_step
from shoal.runfile.run_file import RunConfig, RunFile

SAMPLES, SEQUENCE = 4, 128
MODEL = GPTConfig(
    layers=4, width=128, heads=4, feed_forward="swiglu", feed_forward_width=384, vocabulary=256, tied=True
)
WARM_UP, WINDOWS, STEPS = 2, 5, 6


def crowded_step_s(world: Collective) -> float:
    """Seconds of the step on the slowest rank, in the quietest of a few windows; the same on all ranks."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, ExitStack() as stack:
        step = solo_step(crowd_run(Path(folder), corpus_file(Path(folder))), stack)
        for _ in range(WARM_UP):
            step()
        return min(_slowest_s(step, world) for _ in range(WINDOWS))


def crowd_run(folder: Path, corpus: Path) -> RunFile:
    """The run whose step it is."""
    return RunFile(
        run=RunConfig(name="crowd", steps=10**6, directory=str(folder), processes=1, device="cpu"),
        model=MODEL,
        data=Tokens(path=str(corpus), dtype="uint8"),
        batch=BatchConfig(global_samples=SAMPLES, sequence=SEQUENCE),
    )


def _slowest_s(step: Callable[[], Any], world: Collective) -> float:
    world.barrier().wait()
    begin_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    spent = torch.tensor([(time.perf_counter() - begin_s) / STEPS], dtype=torch.float64)
    world.all_reduce(spent, "max").wait()
    return float(spent)
