"""`python -m benchmarks.feed`: how long a step waits for its data, as it is, and with slow reading.

A run is measured as it is first. Then every sample takes so long to read that one reader is busy for 95 % of a step.
The peer is a loop without read-ahead, which would wait for all of that.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from torch._C._distributed_c10d import PrefixStore

from benchmarks.command import run
from shoal.assembly.objects import UserObjects
from shoal.bench.groups import gathered, join_group, join_store
from shoal.bench.options import AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, check, merged, print_report
from shoal.bench.training_job import Training, start_training, training_job
from shoal.data.sample import Source
from shoal.engine.loop import take_step
from shoal.launcher.environment import Place
from shoal.observe.events import read_events
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

WAITING = 0.02
"""The promised share of a step."""
NEED = 0.95
SLACK_S = 0.02
WARM_UP_STEPS = 5


class SlowSource:
    """A source that gives one sample every `sample_s` seconds, collation included; it has no fast path.

    The clock paces it, because sleeps overshoot: a delay of up to `SLACK_S` is made up for.
    """

    def __init__(self, source: Source, sample_s: float) -> None:
        self._source, self._sample_s, self._free_s = source, sample_s, 0.0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        now_s = time.perf_counter()
        self._free_s = max(self._free_s, now_s - SLACK_S) + self._sample_s
        time.sleep(max(0.0, self._free_s - now_s))
        return self._source[index]


def feed(
    run_files: Annotated[list[Path], typer.Argument(metavar="RUN.toml...", help="Run files with data of Shoal's own.")],
    steps: Annotated[int, typer.Option(help="Steps as they are, and as many with slow reading.", min=10)] = 100,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """How long a step waits for its data, also when reading is slowed to just under the need.

    Example: python -m benchmarks.feed recipes/digits.toml
    """
    if is_rank():
        run_as_rank(lambda place: measure(load_run(run_files[0]), place, steps=steps))
        return
    commands = [["benchmarks.feed", str(file.resolve()), "--steps", str(steps)] for file in run_files]
    print_report("feed", merged(on_ranks(command, processes=processes) for command in commands), as_json=as_json)


def measure(run_file: RunFile, place: Place, *, steps: int) -> Result | None:
    """The row of one run file and its checks; None on all ranks but rank 0."""
    store = join_store(place)
    with ExitStack() as stack:
        training = start_training(run_file, place, stack, store=PrefixStore("as-it-is", store))
        source = training.run.workload.data.train
        share, step_s = _waiting(training, stack, steps)
    samples = run_file.batch.global_samples // place.world_size
    sample_s = NEED * gathered(join_group("clock", place, store), [step_s])[0][0] / samples
    with ExitStack() as stack:
        slow = SlowSource(source, sample_s)
        training = start_training(
            run_file, place, stack, store=PrefixStore("slow", store), objects=UserObjects(data=slow)
        )
        slow_share, slow_step_s = _waiting(training, stack, steps)
    if place.rank != 0:
        return None
    name, reading_s = run_file.run.name, sample_s * samples
    row = {
        "recipe": name,
        "step_ms": round(1e3 * step_s, 2),
        "waiting": round(share, 5),
        "reading_slowed_to_ms": round(1e3 * reading_s, 2),
        "slowed_step_ms": round(1e3 * slow_step_s, 2),
        "waiting_when_slowed": round(slow_share, 5),
        "waiting_without_read_ahead": round(reading_s / (step_s + reading_s), 3),
    }
    checks = [
        check(f"waiting for data, {name}", share, WAITING, at_most=True),
        check(f"waiting for data, reading slowed, {name}", slow_share, WAITING, at_most=True),
    ]
    return {"rows": [row], "checks": checks}


def _waiting(training: Training, stack: ExitStack, steps: int) -> tuple[float, float]:
    """The share of the steps' time that was spent waiting for data, and the median step's seconds."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
    job = training_job(training, folder, stack)
    for _ in range(WARM_UP_STEPS + steps):
        take_step(job)
    events = read_events(folder, training.run.process.place.rank)[WARM_UP_STEPS:]
    step_s = [event.get("time/step") or 0.0 for event in events]
    return sum(event.get("time/data") or 0.0 for event in events) / sum(step_s), statistics.median(step_s)


if __name__ == "__main__":
    run(feed)
