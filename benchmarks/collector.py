"""`python -m benchmarks.collector`: pauses of Python's garbage collector on four ranks, as it is and under
`memory.collect_every_steps`.

Each rank trains a small GPT and holds the objects of a large program (a list of dictionaries). In every step it makes
objects in cycles, as loaders and loggers do, and others that live for some steps, as a buffer that shuffles samples
does: another number on each rank. The latter have Python look at all objects now and then, on each rank in another
step. A step waits for the rank whose pause is the longest, so what counts is by how much the pauses of a step differ:
the spread is the longest less the shortest, and the row has its mean over the steps after the warm-up. Pauses are
seconds of the processor, as ranks that share cores interrupt each other; by the clock they stand beside.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from shoal.assembly.run import open_run
from shoal.bench.groups import join_store
from shoal.bench.options import AsJson
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, Row, check, print_report
from shoal.launcher.environment import Place
from shoal.memory.collector import PauseTimer
from shoal.runfile.run_file import RunFile

RANKS, EVERY, WARM_UP, BOUND = 4, 20, 5, 5.0
BUFFERED_STEPS = 40
CLOCKS = {"": time.thread_time, "by_the_clock_": time.perf_counter}
WAYS = {"Python decides": 0, f"every {EVERY} steps": EVERY}


def collector(
    steps: Annotated[int, typer.Option(help="Steps of each way.", min=50)] = 120,
    objects: Annotated[int, typer.Option(help="Objects that live all the time.", min=1000)] = 300_000,
    garbage: Annotated[int, typer.Option(help="Objects in cycles that a rank makes in a step, at most.", min=1)] = 4000,
    buffered: Annotated[
        int, typer.Option(help=f"Objects of a step, at most, that live for {BUFFERED_STEPS} steps.", min=0)
    ] = 16_000,
    as_json: AsJson = False,
) -> None:
    """How far the pauses of Python's collector differ over four ranks.

    Example: python -m benchmarks.collector --steps 120
    """
    if is_rank():
        run_as_rank(
            lambda place: measure(place, steps=steps, objects=objects, makes=Makes(garbage=garbage, buffered=buffered))
        )
        return
    sizes = {"steps": steps, "objects": objects, "garbage": garbage, "buffered": buffered}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    print_report("collector", on_ranks(["benchmarks.collector", *options], processes=RANKS), as_json=as_json)


@dataclass(frozen=True)
class Makes:
    """Objects that a rank makes in a step, at most: those in cycles, and those that live on for a while."""

    garbage: int
    buffered: int


def measure(place: Place, *, steps: int, objects: int, makes: Makes) -> Result | None:
    """A row for each way. None on all ranks but rank 0."""
    torch.set_num_threads(1)
    store, rows = join_store(place), list[Row]()
    living = _objects(objects)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        (Path(folder) / "tokens.bin").write_bytes(np.zeros(1 << 16, np.uint8).tobytes())
        for way, every in WAYS.items():
            own = _pauses(_run_file(Path(folder), every), place, PrefixStore(way, store), steps, makes)
            row: Row = {"way": way}
            for clock, pauses in own.items():
                found = _compared(pauses, place, PrefixStore(f"{way}/{clock}pauses", store))
                row |= {f"{clock}{name}": value for name, value in found.items()}
            rows.append(row)
    del living
    if place.rank != 0:
        return None
    ratio = float(rows[0]["spread_ms"]) / max(1e-9, float(rows[1]["spread_ms"]))
    return {"rows": rows, "checks": [check("the spread falls by a factor of", ratio, BOUND, at_most=False)]}


def _run_file(folder: Path, every: int) -> RunFile:
    tables: dict[str, Any] = {
        "run": {"name": "collector", "steps": 1000, "directory": str(folder / "run"), "processes": RANKS},
        "model": {"kind": "gpt", "vocabulary": 256, "layers": 2, "width": 64, "heads": 4},
        "data": {"kind": "tokens", "path": str(folder / "tokens.bin"), "dtype": "uint8"},
        "batch": {"global_samples": RANKS, "sequence": 64},
        "memory": {"collect_every_steps": every},
    }
    return msgspec.convert(tables, RunFile)


def _pauses(file: RunFile, place: Place, store: Store, steps: int, makes: Makes) -> dict[str, list[float]]:
    """Seconds that this rank's collector took in each step, by each of the clocks."""
    timers = {name: PauseTimer(clock) for name, clock in CLOCKS.items()}
    one, draws, buffer = (
        open_run(file, place, store=store),
        random.Random(place.rank),
        deque[Any](maxlen=BUFFERED_STEPS),
    )
    feed, found = one.feed(), {name: list[float]() for name in timers}
    for number in range(1, steps + 1):
        one.step(number, feed.next().microbatches, lr=1e-3)
        _make_cycles(draws.randrange(makes.garbage))
        buffer.append(_objects(draws.randrange(makes.buffered + 1)))
        one.tiers.take_figures()
        for name, timer in timers.items():
            found[name].append(timer.take_s())
    for timer in timers.values():
        timer.close()
    feed.close()
    one.end()
    buffer.clear()
    gc.collect()
    return {name: own[WARM_UP:] for name, own in found.items()}


def _objects(number: int) -> list[dict[str, Any]]:
    return [{"number": each, "more": [each]} for each in range(number // 2)]


def _make_cycles(objects: int) -> None:
    for _ in range(objects // 2):
        cycle: dict[str, Any] = {}
        cycle["itself"] = [cycle]


def _compared(own: list[float], place: Place, store: Store) -> Row:
    """Of all ranks' pauses, step by step."""
    store.set(str(place.rank), msgspec.json.encode(own).decode())
    ranks = [msgspec.json.decode(store.get(str(rank)), type=list[float]) for rank in range(place.world_size)]
    store.set(f"read-{place.rank}", "")
    for rank in range(place.world_size):
        store.get(f"read-{rank}")  # rank 0 keeps the store that the others still read
    steps = np.array(ranks)
    spread = steps.max(0) - steps.min(0)
    return {
        "steps": len(own),
        "pauses": int((steps > 0).sum()),
        "of_a_rank_ms": round(1e3 * float(steps.mean()), 3),
        "longest_ms": round(1e3 * float(steps.max()), 1),
        "waited_ms": round(1e3 * float(steps.max(0).mean()), 3),
        "spread_ms": round(1e3 * float(spread.mean()), 3),
    }


if __name__ == "__main__":
    run(collector)
