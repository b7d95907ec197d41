"""What a training step costs beside its operators: Python, other ranks on the same cores, and waiting for them.

Python, hooks and the loop, by step, by microbatch and by layer: measured on GPTs so small that their operators, at the
smallest sizes that `operator_times` measures, are easily subtracted. They have few and many layers, few and many
microbatches; `cost.operators` separates the three parts.

Contention: ranks that compute at the same time lose more than their share of the cores, because every change of ranks
fills the caches anew and the memory's rate is shared. Windows of single operators are as short as a time slice and miss
that. So all ranks take the same step of a small GPT at once, without talking, and the slowest rank counts.

Waiting: pieces of computation of several lengths, with an all-reduce after each and without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.bench.operator_times import rank_mean
from shoal.bench.ranks import rank_folder
from shoal.bench.training_job import corpus_file, small_gpt_run_file, start_alone
from shoal.bench.turns import repeat, slowest
from shoal.comm.collective import Collective
from shoal.data.config import BatchConfig
from shoal.models.config import GPTConfig
from shoal.runfile.run_file import RunFile

TINY_SEQUENCE, TINY_WIDTH = 64, 32
TINY_SIZES = ((1, 1), (5, 1), (1, 5))
"""Layers and microbatches."""
TINY_WARM_UP, TINY_STEPS = 5, 30

CROWD_SAMPLES, CROWD_SEQUENCE = 4, 128
CROWD_MODEL = GPTConfig(
    layers=4, width=128, heads=4, feed_forward="swiglu", feed_forward_width=384, vocabulary=256, tied=True
)
CROWD_WARM_UP, CROWD_WINDOWS, CROWD_STEPS = 2, 5, 6

PIECE_WIDTH, PIECE_INNER = 128, 384
PIECES = ((64, 1), (256, 2), (1024, 2), (1024, 8))
"""Tokens, and how many feed-forwards of them: from a tenth of a millisecond to some twenty."""
PIECE_WINDOW_S, PIECE_REPEATS = 0.1, 5
MANY_BYTES = 1 << 20


def host_times() -> Iterator[dict[str, Any]]:
    """A row of the calibration for each tiny GPT: m layers, n microbatches, and the seconds of its step."""
    with rank_folder() as folder:
        corpus = corpus_file(folder)
        for layers, microbatches in TINY_SIZES:
            seconds = _tiny_step_s(folder, corpus, layers, microbatches)
            yield {
                "operator": "step", "dtype": "float32", "m": layers, "n": microbatches, "k": 1, "ranks": 1,
                "forward_s": seconds, "backward_s": 0.0,
            }  # fmt: skip


def crowded_step_s(world: Collective) -> float:
    """Seconds of the small GPT's step on the slowest rank, in the fastest of a few windows; the same on all ranks."""
    with rank_folder() as folder, ExitStack() as stack:
        training = start_alone(crowd_run(folder, corpus_file(folder)), stack)
        repeat(training.take_step, CROWD_WARM_UP)
        windows = [slowest(lambda: repeat(training.take_step, CROWD_STEPS), world) for _ in range(CROWD_WINDOWS)]
    return min(windows) / CROWD_STEPS


def crowd_run(folder: Path, corpus: Path) -> RunFile:
    """The run of the small GPT."""
    return small_gpt_run_file(
        folder, corpus, CROWD_MODEL, BatchConfig(global_samples=CROWD_SAMPLES, sequence=CROWD_SEQUENCE)
    )


def wait_times(world: Collective) -> Iterator[dict[str, Any]]:
    """A row of the calibration for each piece of computation, the same on all ranks.

    `wait_s` is what an all-reduce of a few numbers adds to the piece, `byte_s` what each byte of a larger one adds. Of
    a few windows the fastest counts.
    """
    few, many = torch.zeros(8), torch.zeros(MANY_BYTES // 4)
    for tokens, layers in PIECES:
        work = _piece(tokens, layers)
        count = max(3, int(PIECE_WINDOW_S / _mean_s(world, work, 3)))
        sides = (work, _then_all_reduce(work, world, few), _then_all_reduce(work, world, many))
        times = [[_mean_s(world, side, count) for side in sides] for _ in range(PIECE_REPEATS)]
        piece_s, few_s, many_s = map(min, zip(*times, strict=True))
        yield {
            "ranks": world.size,
            "piece_s": piece_s,
            "wait_s": max(0.0, few_s - piece_s),
            "byte_s": max(0.0, (many_s - few_s) / MANY_BYTES),
        }


def _tiny_step_s(folder: Path, corpus: Path, layers: int, microbatches: int) -> float:
    model = GPTConfig(
        layers=layers, width=TINY_WIDTH, heads=4, feed_forward="swiglu", feed_forward_width=TINY_WIDTH, vocabulary=256,
        tied=True,
    )  # fmt: skip
    batch = BatchConfig(global_samples=microbatches, micro_samples=1, sequence=TINY_SEQUENCE)
    with ExitStack() as stack:
        training, times = start_alone(small_gpt_run_file(folder, corpus, model, batch), stack), []
        for _ in range(TINY_WARM_UP + TINY_STEPS):
            begin_s = time.perf_counter()
            training.take_step()
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times[TINY_WARM_UP:])


def _piece(tokens: int, layers: int) -> Callable[[], None]:
    x, down = torch.randn(tokens, PIECE_WIDTH), torch.randn(PIECE_WIDTH, PIECE_INNER)
    up = torch.randn(PIECE_INNER, PIECE_WIDTH)

    def work() -> None:
        for _ in range(layers):
            y = F.linear(F.silu(F.linear(x, up)), down)
            F.rms_norm(y + x, (PIECE_WIDTH,))

    return work


def _then_all_reduce(work: Callable[[], None], world: Collective, numbers: Tensor) -> Callable[[], None]:
    def both() -> None:
        work()
        world.all_reduce(numbers).wait()

    return both


def _mean_s(world: Collective, work: Callable[[], None], count: int) -> float:
    """Seconds of one of `count` calls, in the mean over the ranks, which begin together."""
    world.barrier().wait()
    begin_s = time.perf_counter()
    repeat(work, count)
    return rank_mean(world, [(time.perf_counter() - begin_s) / count])[0]
