"""`python -m benchmarks.check`: what a step costs when ranks compare their collectives, beside the step without it.

A case is one transport and one layout. Its steps are taken in turn with `wire.check_collectives` on, off, and off again
in a run of its own (A/A).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from shoal.bench.groups import interleaved, join_group, join_store
from shoal.bench.options import AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, Turns, again_cells, columns, milliseconds, print_report, ratios
from shoal.bench.report import check as check_figure
from shoal.bench.training_job import corpus_file, gpt_run_file, start_training, training_job
from shoal.comm.collective import Collective
from shoal.comm.config import TransportName, WireConfig
from shoal.engine.loop import take_step
from shoal.launcher.environment import Place
from shoal.memory.config import MemoryConfig
from shoal.runfile.run_file import RunFile
from shoal.topology.config import LayoutConfig

SIDES = {"on": True, "off": False, "off_again": False}
TRANSPORTS: tuple[TransportName, ...] = ("gloo", "shm")
MOST = 1.05
"""What a step with the check may take of one without."""


class Case(NamedTuple):
    """How the ranks are laid out; `layout` takes their number."""

    layout: Callable[[int], LayoutConfig]
    zero: int = 3


CASES = {
    "replicate": Case(lambda ranks: LayoutConfig(replicate=ranks)),
    "tensor": Case(lambda ranks: LayoutConfig(tensor=ranks)),
    "zero_3": Case(lambda ranks: LayoutConfig(shard=ranks)),
}


def check(
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and step; a multiple of 128.", min=128)] = 256,
    pairs: Annotated[int, typer.Option(help="Turns of each case.", min=3)] = 40,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps with wire.check_collectives on, off, and off again: over Gloo and shared memory, in three layouts.

    Example: python -m benchmarks.check --pairs 10
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, tokens=tokens, pairs=pairs))
        return
    command = ["benchmarks.check", "--tokens", str(tokens), "--pairs", str(pairs)]
    print_report("check", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, *, tokens: int, pairs: int) -> Result | None:
    """A row and a check for each case, for `tokens` of a rank and step; None on all ranks but rank 0."""
    store = join_store(place)
    clock = join_group("clock", place, store)
    rows, checks = [], []
    for transport in TRANSPORTS:
        for name, case in CASES.items():
            own = PrefixStore(f"{transport}/{name}", store)
            turns = _turns(case, transport, place, own, clock, tokens=tokens, pairs=pairs)
            cells = {"transport": transport, "layout": name, "tokens_per_rank": tokens, "ranks": place.world_size}
            rows.append(row := cells | _cells(turns))
            name = f"step with the check, {transport}, {name}"
            checks.append(check_figure(name, row["on_over_off"], MOST, at_most=True))
    return {"rows": rows, "checks": checks} if place.rank == 0 else None


def _turns(
    case: Case, transport: TransportName, place: Place, store: Store, clock: Collective, *, tokens: int, pairs: int
) -> Turns:  # fmt: skip
    with ExitStack() as stack:
        sides: dict[str, Callable[[], Any]] = {}
        for side, compared in SIDES.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
            run_file = msgspec.structs.replace(
                gpt_run_file(folder, corpus_file(folder), tokens * place.world_size),
                layout=case.layout(place.world_size),
                memory=MemoryConfig(zero=case.zero),
                wire=WireConfig(transport=transport, check_collectives=compared),
            )
            sides[side] = _stepper(run_file, folder, place, PrefixStore(side, store), stack)
        return interleaved(sides, clock, pairs=pairs, always=tuple(SIDES))


def _stepper(run_file: RunFile, folder: Path, place: Place, store: Store, stack: ExitStack) -> Callable[[], Any]:
    job = training_job(start_training(run_file, place, stack, store=store), folder, stack)
    return lambda: take_step(job)


def _cells(turns: Turns) -> dict[str, Any]:
    cost = ratios(turns, "off", peer="on")
    return {
        "pairs": len(cost),
        **milliseconds({side: seconds for side, seconds in columns(turns).items() if side in SIDES}),
        "on_over_off": round(statistics.median(cost), 4),
        **again_cells(ratios(turns, "off", peer="off_again")),
    }


if __name__ == "__main__":
    run(check)
