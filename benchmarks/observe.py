"""`python -m benchmarks.observe`: what the observation that is always on costs a step.

One run takes its steps in pairs, in an order that changes: as `shoal train` does, with measurements, events, log and
terminal; and bare, which is the same feed and step and nothing else. A third side is bare again (A/A): how far noise
alone moves the ratio. The time inside the observing code is also measured by itself, step by step, which no neighbour
on the machine can hide.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore

from benchmarks.command import run
from shoal.bench.groups import join_group, join_store
from shoal.bench.options import FEWEST_PAIRS, AsJson, Processes
from shoal.bench.pairs import again_cells, columns, milliseconds, ratios
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, check, print_report
from shoal.bench.training_job import Training, start_training, training_job
from shoal.bench.turns import interleaved
from shoal.engine.loop import Job, take_step
from shoal.launch.environment import Place
from shoal.observe.sink import RunStart, Sinks
from shoal.observe.sinks import open_sinks
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

OBSERVED, BARE, AGAIN = "observed", "bare", "bare_again"
SHARE = 0.01
"""The promised share of a step."""


class TimedSinks(Sinks):
    """The sinks of a run, with the seconds of each `record`."""

    def __init__(self, *sinks: Sinks) -> None:
        super().__init__(*sinks)
        self.spent_s: list[float] = []

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        begin_s = time.perf_counter()
        super().record(step, values, time_s=time_s)
        self.spent_s.append(time.perf_counter() - begin_s)


def observe(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    pairs: Annotated[int, typer.Option(help="Pairs of steps.", min=10)] = FEWEST_PAIRS,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """What measurements, events, log and terminal cost a step.

    Example: python -m benchmarks.observe recipes/stdlib-gpt.toml
    """
    if is_rank():
        run_as_rank(lambda place: measure(load_run(run_file), place, pairs=pairs))
        return
    command = ["benchmarks.observe", str(run_file.resolve()), "--pairs", str(pairs)]
    print_report("observe", on_ranks(command, processes=processes), as_json=as_json)


def measure(run_file: RunFile, place: Place, *, pairs: int) -> Result | None:
    """The row and its checks; None on all ranks but rank 0."""
    endless = msgspec.structs.replace(run_file.run, steps=10**6)
    run_file = msgspec.structs.replace(run_file, run=endless)
    store = join_store(place)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        training = start_training(run_file, place, stack, store=PrefixStore("run", store))
        sinks = _sinks(run_file, folder, place)
        stack.enter_context(sinks)
        job = replace(training_job(training, folder / "job", stack), sinks=sinks)
        sides = {
            OBSERVED: lambda: take_step(job),
            BARE: lambda: _bare(training, job),
            AGAIN: lambda: _bare(training, job),
        }
        clock = join_group("clock", place, store)
        turns = interleaved(sides, clock, pairs=pairs, always=(OBSERVED, BARE, AGAIN))
    if place.rank != 0:
        return None
    cost = [1 / ratio - 1 for ratio in ratios(turns, OBSERVED, peer=BARE)]
    step_s = statistics.median(columns(turns)[BARE])
    inside = statistics.median(sinks.spent_s) / step_s
    row = {
        "recipe": run_file.run.name,
        "ranks": place.world_size,
        "pairs": len(turns),
        **milliseconds(columns(turns)),
        "sinks_us": round(1e6 * statistics.median(sinks.spent_s), 1),
        **again_cells(ratios(turns, AGAIN, peer=BARE)),
    }
    name = f"{run_file.run.name}, {place.world_size} ranks"
    checks = [
        check(f"observation, share of a step (median of pairs), {name}", statistics.median(cost), SHARE, at_most=True),
        check(f"time in the sinks, share of a step, {name}", inside, SHARE, at_most=True),
    ]
    return {"rows": [row], "checks": checks}


def _sinks(run_file: RunFile, folder: Path, place: Place) -> TimedSinks:
    """Those of `shoal train`; the terminal of rank 0 is one that nobody reads."""
    observe = msgspec.structs.replace(run_file.observe, report=False)
    stream = io.StringIO() if place.rank == 0 else sys.stdout
    sinks = TimedSinks(open_sinks(observe, folder, rank=place.rank, stream=stream, reports_failure=False))
    sinks.start(RunStart(name=run_file.run.name, total_steps=run_file.run.steps))
    return sinks


def _bare(training: Training, job: Job) -> None:
    """The same feed, step and progress, and no measurement."""
    fed = training.feed.next()
    number = job.progress.step + 1
    result = job.step(number, fed.microbatches, lr=job.rate(number))
    job.progress.advance(fed.interval, tokens=0, committed=result.committed)


if __name__ == "__main__":
    run(observe)
