"""`python -m benchmarks.division`: the slow worker changes in mid-run; how soon the division of work follows.

Four workers under all-reduce divide the samples of each step by their speeds. One is `--slow` times slower than the
rest, and every `--steps` steps it is another one. Workers are paced (`shoal.bench.training_job`), so that cores which
they share change little. With a divided step the ideal time is

    ideal = samples * sample_s / (workers - 1 + 1 / slow)

and a row says what part of the ideal's throughput the median step has: in the first steps after a change, while the
division is that of the old speeds, and from step `FOLLOWED` on.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run
from shoal.assembly.job import replica_speeds
from shoal.bench.groups import join_store
from shoal.bench.options import AsJson
from shoal.bench.ranks import is_rank, on_ranks, rank_folder, run_as_rank
from shoal.bench.report import Result, Row, check, print_report
from shoal.bench.sync import GLOBAL_SAMPLES, run_file_of
from shoal.bench.training_job import pace, start_training, training_job
from shoal.engine.loop import take_step
from shoal.launcher.environment import Place

FOLLOWED, PART = 20, 0.85
EVEN = -1
"""The worker that is slow where none is."""


def division(
    slow: Annotated[float, typer.Option(help="Times as long for a sample on the slow worker.", min=1)] = 4.0,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds for a sample on the others.", min=0.01)] = 10.0,
    steps: Annotated[int, typer.Option(help="Steps between two changes.", min=2 * FOLLOWED)] = 60,
    changes: Annotated[int, typer.Option(help="How often another worker becomes slow.", min=1)] = 4,
    processes: Annotated[int, typer.Option(help="Workers of one thread.", min=2, max=GLOBAL_SAMPLES)] = 4,
    as_json: AsJson = False,
) -> None:
    """Throughput after the slow worker has changed, beside the ideal for the new speeds.

    Example: python -m benchmarks.division --slow 2
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, slow=slow, sample_s=sample_ms / 1e3, steps=steps, changes=changes))
        return
    command = ["benchmarks.division", "--slow", str(slow), "--sample-ms", str(sample_ms)]
    command += ["--steps", str(steps), "--changes", str(changes)]
    print_report("division", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, *, slow: float, sample_s: float, steps: int, changes: int) -> Result | None:
    """A row for the even workers at first, and one for each slow worker; None on all ranks but rank 0."""
    store, workers = join_store(place), place.world_size
    slow_ones = [EVEN, *(change % workers for change in range(changes))]
    with rank_folder() as folder, ExitStack() as stack:
        run_file = run_file_of("allreduce+by_speed", folder / "run", processes=workers, steps=steps * len(slow_ones))
        training = start_training(run_file, place, stack, store=store)
        paced = pace(training.run.step.context, sample_s)
        job = training_job(training, Path(str(run_file.run.directory)), stack)
        job = replace(job, rate=training.run.rate, speeds=replica_speeds(training.run, training.feed, job.sinks))
        rows: list[Row] = []
        for slow_one in slow_ones:
            paced.sample_s = sample_s * (slow if place.rank == slow_one else 1.0)
            seconds = []
            for _ in range(steps):
                begin_s = time.perf_counter()
                take_step(job)
                seconds.append(time.perf_counter() - begin_s)
            speeds = workers if slow_one == EVEN else workers - 1 + 1 / slow
            rows.append(row_of(slow_one, seconds, ideal_s=GLOBAL_SAMPLES * sample_s / speeds))
    return result_of(rows) if place.rank == 0 else None


def row_of(slow_one: int, seconds: list[float], *, ideal_s: float) -> Row:
    """Median steps before and after the division should have followed, and their part of the ideal throughput."""
    first, then = statistics.median(seconds[:4]), statistics.median(seconds[FOLLOWED:])
    return {
        "slow": "none" if slow_one == EVEN else f"worker {slow_one}",
        "ideal_ms": round(1e3 * ideal_s, 1),
        "first_4_ms": round(1e3 * first, 1),
        f"from_step_{FOLLOWED}_ms": round(1e3 * then, 1),
        "of_ideal": round(ideal_s / then, 3),
    }


def result_of(rows: list[Row]) -> Result:
    """The rows, and the promised part of the ideal for each change."""
    checks = [check(f"slow {row['slow']}: part of the ideal", row["of_ideal"], PART) for row in rows[1:]]
    return {"rows": rows, "checks": checks}


if __name__ == "__main__":
    run(division)
