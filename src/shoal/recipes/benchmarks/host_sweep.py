"""What a training step costs beside its operators: Python, hooks, the loop; per step, per microbatch and per layer.

Measured on GPTs so small that their operators, at the smallest sizes of the operators' sweep, are soon subtracted: one
with few and one with many layers, and with few and many microbatches. `cost.host` takes the three apart.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from shoal.data.config import BatchConfig, Tokens
from shoal.launch.environment import Place
from shoal.models.config import GPTConfig
from shoal.recipes.assembly import new_feed, new_state, new_step, new_sync
from shoal.recipes.benchmarks.gpt_job import LR, corpus_file
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import set_up
from shoal.runfile.run_file import RunConfig, RunFile

SEQUENCE, WIDTH, VOCABULARY = 64, 32, 64
SIZES = ((1, 1), (5, 1), (1, 5))
"""Layers and microbatches."""
WARM_UP, STEPS = 5, 30


def tiny(layers: int) -> GPTConfig:
    """The model whose step is measured."""
    return GPTConfig(
        layers=layers, width=WIDTH, heads=4, feed_forward="swiglu", feed_forward_width=WIDTH, vocabulary=256, tied=True
    )


def host_times() -> Iterator[dict[str, Any]]:
    """A row of the calibration for each size: m layers, n microbatches."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        corpus = corpus_file(Path(folder))
        for layers, microbatches in SIZES:
            seconds = _step_s(Path(folder), corpus, layers, microbatches)
            yield {
                "operator": "step", "dtype": "float32", "m": layers, "n": microbatches, "k": 1, "ranks": 1,
                "forward_s": seconds, "backward_s": 0.0,
            }  # fmt: skip


def solo_step(run_file: RunFile, stack: ExitStack) -> Callable[[], Any]:
    """A step of the run on this rank alone, who talks to nobody; `stack` closes what it opens."""
    place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, launcher="shoal")
    setting = set_up(run_file, place, UserObjects(), store=HashStore())
    sync = new_sync(setting)
    stack.callback(sync.close)
    state = new_state(setting, sync)
    step, feed = new_step(setting, state, sync), stack.enter_context(new_feed(setting, state.cursor))
    numbers = iter(range(1, 10**9))
    return lambda: step(next(numbers), feed.next().microbatches, lr=LR)


def _step_s(folder: Path, corpus: Path, layers: int, microbatches: int) -> float:
    run_file = RunFile(
        run=RunConfig(name="host", steps=10**6, directory=str(folder), processes=1, device="cpu"),
        model=tiny(layers),
        data=Tokens(path=str(corpus), dtype="uint8"),
        batch=BatchConfig(global_samples=microbatches, micro_samples=1, sequence=SEQUENCE),
    )
    with ExitStack() as stack:
        step, times = solo_step(run_file, stack), []
        for _ in range(WARM_UP + STEPS):
            begin_s = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times[WARM_UP:])
