"""`python -m benchmarks.observe`: what each way of observing a run costs a step.

Sides take blocks of steps in turn, in an order that changes. They differ in who hears of a step:

    bare          the same feed and step, and nobody; taken twice (A/A), which says how far noise alone moves a ratio
    always        as `shoal train` in a pipe: measurements, the log, events, a line now and then
    live line     the same, drawn in place on a terminal, four times a second
    prometheus    `always`, and the endpoint, which is asked each second (Prometheus: each minute)
    tensorboard   `always`, and the writer of its files, in a thread of its own
    page          `always`, and the live page, which looks each two seconds as in a run; here in rank 0, in a run in the
                  launcher

What works beside the steps works in the blocks of its own side alone, and as often as in a run: what it does now and
then would be seen in no single step. The time inside `record` is also measured by itself, which no neighbour on the
machine can hide.
"""

from __future__ import annotations

import io
import os
import pty
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore

from benchmarks.command import run
from shoal.bench.groups import interleaved, join_group, join_store, repeat
from shoal.bench.options import AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, Turns, again_cells, check, columns, print_report, ratios
from shoal.bench.training_job import Training, start_training, training_job
from shoal.engine.loop import Job, take_step
from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place
from shoal.observe.sink import Ending, RunStart, Sinks
from shoal.observe.sinks import open_sinks
from shoal.observe.terminal import LiveDisplay
from shoal.page.live_run import LiveRun
from shoal.page.server import BESIDE_POLL_S, Follower
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

BARE, AGAIN, ALWAYS = "bare", "bare again", "always"
LIVE, PROMETHEUS, TENSORBOARD, PAGE = "live line", "prometheus", "tensorboard", "page"
NEEDS = {PROMETHEUS: "prometheus_client", TENSORBOARD: "tensorboardX"}
"""The package of an optional extra that a side imports."""
SHARE = 0.01
"""The promised share of a step."""
RECIPE = Path(__file__).parent.parent / "recipes" / "stdlib-gpt.toml"
ASKED_S, SCRAPED_S = 10.0, 1.0
"""The longest that an answer may take, and from one question to the next."""


class TimedSinks(Sinks):
    """The sinks of a run, with the seconds of each `record`."""

    def __init__(self, *sinks: Sinks | LiveDisplay) -> None:
        super().__init__(*sinks)
        self.spent_s: list[float] = []

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        begin_s = time.perf_counter()
        super().record(step, values, time_s=time_s)
        self.spent_s.append(time.perf_counter() - begin_s)


@dataclass(frozen=True)
class Side:
    """A way of taking steps: its sinks, what takes one step, and what works beside a block of them."""

    sinks: TimedSinks
    take: Callable[[], Any]
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext


def observe(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="The run file; default: recipes/stdlib-gpt.toml.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Turns of all sides.", min=10)] = 40,
    block: Annotated[int, typer.Option(help="Steps in a row of one side.", min=1)] = 24,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """What measurements, events, log, live line, Prometheus, TensorBoard and page cost a step.

    Example: python -m benchmarks.observe --pairs 30
    """
    file = run_file or RECIPE
    if is_rank():
        run_as_rank(lambda place: measure(load_run(file), place, pairs=pairs, block=block))
        return
    load_run(file)  # refused before ranks start
    command = ["benchmarks.observe", str(file.resolve()), "--pairs", str(pairs), "--block", str(block)]
    result = on_ranks(command, processes=processes)
    for name in _missing():
        print(f"{name} is not measured: the package {NEEDS[name]} is not installed", file=sys.stderr)
    print_report("observe", result, as_json=as_json)


def measure(run_file: RunFile, place: Place, *, pairs: int, block: int) -> Result | None:
    """A row for each side and the checks; None on all ranks but rank 0."""
    endless = msgspec.structs.replace(run_file.run, steps=10**6)
    run_file = msgspec.structs.replace(run_file, run=endless)
    store = join_store(place)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        training = start_training(run_file, place, stack, store=PrefixStore("run", store))
        job = training_job(training, folder / "job", stack)
        observed = {name: _side(name, job, run_file, folder, place, stack) for name in _names()}
        bare = Side(TimedSinks(), lambda: _bare(training, job))
        sides = {BARE: bare, AGAIN: bare, **observed}
        takes = {name: partial(_take_block, side, block) for name, side in sides.items()}
        clock = join_group("clock", place, store)
        turns = interleaved(takes, clock, pairs=pairs, always=tuple(takes))
        turns = [{name: seconds / block for name, seconds in turn.items()} for turn in turns]
        spent_s = {name: statistics.median(side.sinks.spent_s) for name, side in observed.items()}
    return result_of(turns, spent_s, name=run_file.run.name, ranks=place.world_size) if place.rank == 0 else None


def result_of(turns: Turns, spent_s: Mapping[str, float], *, name: str, ranks: int) -> Result:
    """Rows and checks from the turns, and from the median seconds of a `record` by side."""
    times_s = {side: statistics.median(seconds) for side, seconds in columns(turns).items()}
    cost = {side: statistics.median(1 / ratio - 1 for ratio in ratios(turns, side, peer=BARE)) for side in spent_s}
    in_record = {side: seconds / times_s[BARE] for side, seconds in spent_s.items()}
    rows = [
        {
            "recipe": name,
            "ranks": ranks,
            "pairs": len(turns),
            "bare_ms": round(1e3 * times_s[BARE], 2),
            **again_cells(ratios(turns, AGAIN, peer=BARE)),
        },
        *(
            {
                "observed_by": side,
                "step_ms": round(1e3 * times_s[side], 2),
                "share_of_a_step": round(cost[side], 4),
                "in_record_us": round(1e6 * spent_s[side], 1),
                "record_share": round(in_record[side], 5),
            }
            for side in spent_s
        ),
    ]
    figures = (("share of a step (median of pairs)", cost), ("time in record, share of a step", in_record))
    checks = [
        check(f"{what}, {side}, {name}, {ranks} ranks", share[side], SHARE, at_most=True)
        for side in spent_s
        for what, share in figures
    ]
    return {"rows": rows, "checks": checks}


def _missing() -> list[str]:
    return [name for name, package in NEEDS.items() if find_spec(package) is None]


def _names() -> list[str]:
    return [name for name in (ALWAYS, LIVE, PROMETHEUS, TENSORBOARD, PAGE) if name not in _missing()]


def _side(name: str, job: Job, run_file: RunFile, folder: Path, place: Place, stack: ExitStack) -> Side:
    """The side of this rank. Only rank 0 has more than the log and events, as in a run."""
    directory = folder / name.replace(" ", "-")
    config = msgspec.structs.replace(
        run_file.observe,
        report=False, live=False, mlflow=None, wandb="off", webhook=None,
        tensorboard=name == TENSORBOARD, prometheus_port=0 if name == PROMETHEUS else None,
    )  # fmt: skip
    stream = io.StringIO()
    sinks = TimedSinks(open_sinks(config, directory, rank=place.rank, stream=stream, reports_failure=False))
    start = RunStart(name=run_file.run.name, total_steps=run_file.run.steps)
    live = LiveDisplay(stack.enter_context(_terminal())) if name == LIVE and place.rank == 0 else None
    if live is not None:
        sinks.add(live)
    stack.enter_context(sinks)
    sinks.start(start)
    own = replace(job, sinks=sinks)
    if place.rank != 0:
        return Side(sinks, lambda: take_step(own))
    if live is not None:
        live.finish(Ending("finished"))
        return Side(sinks, lambda: take_step(own), lambda: _drawing(live, start))
    if name == PROMETHEUS:
        address = _address_in(stream.getvalue())
        return Side(sinks, lambda: take_step(own), lambda: _reading(lambda: _ask(address), every_s=SCRAPED_S))
    if name == PAGE:
        follower = Follower([LiveRun(directory, begun=False)])
        return Side(sinks, lambda: take_step(own), lambda: _reading(follower.poll, every_s=BESIDE_POLL_S))
    return Side(sinks, lambda: take_step(own))


def _take_block(side: Side, steps: int) -> None:
    with side.beside():
        repeat(side.take, steps)


def _address_in(said: str) -> str:
    """The endpoint's, in what its sink has noted. Raises `EnvironmentFault` where it could not listen."""
    found = re.search(r"http://\S+", said)
    if found is None:
        raise EnvironmentFault(f"there is no endpoint for Prometheus to ask: {said.strip()}")
    return found.group()


def _ask(address: str) -> None:
    with urllib.request.urlopen(address, timeout=ASKED_S) as answer:
        answer.read()


@contextmanager
def _drawing(live: LiveDisplay, start: RunStart) -> Iterator[None]:
    live.start(start)
    yield
    live.finish(Ending("finished"))


@contextmanager
def _reading(read: Callable[[], Any], *, every_s: float) -> Iterator[None]:
    """Reads at once and then every so many seconds, in a thread, as endpoint and page do."""
    ended = threading.Event()

    def work() -> None:
        read()
        while not ended.wait(every_s):
            read()

    reader = threading.Thread(target=work)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()


@contextmanager
def _terminal() -> Iterator[Any]:
    """A terminal that somebody reads."""
    outer, inner = pty.openpty()

    def read() -> None:
        try:
            while os.read(outer, 1 << 16):
                pass
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(inner, "w") as stream:
        yield stream
    reader.join()
    os.close(outer)


def _bare(training: Training, job: Job) -> None:
    """The same feed, step and progress, and no measurement."""
    fed = training.feed.next()
    number = job.progress.step + 1
    result = job.step(number, fed.microbatches, lr=job.rate(number))
    job.progress.advance(fed.interval, tokens=0, committed=result.committed)


if __name__ == "__main__":
    run(observe)
