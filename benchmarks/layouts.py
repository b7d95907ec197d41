"""`python -m benchmarks.layouts RUN.toml`: a run in many layouts, seconds and bytes of a step beside their predictions.

The cases have every axis, ZeRO stage and kind of schedule at least once. All layouts are built in the same processes,
those of fewer ranks in some of them, and take their steps in turn, so that what slows the machine slows all of them.
Turns in which other programs used much of the machine do not count (`quiet_turns`). The bytes of tensors at the peak of
a step are measured before, each layout alone.

Predictions use the calibration of `shoal bench products`, and one measured step: the row of the first case, which is
marked and left out of the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from benchmarks.layout_cases import CASES, run_file_of
from benchmarks.layouts_predicted import check_predictable, checks_of, compared, constants, rows_of
from benchmarks.quiet_turns import in_turn, quiet_median_s
from shoal.bench.groups import join_group, join_store
from shoal.bench.options import AsJson
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import print_report
from shoal.bench.training_job import start_training
from shoal.comm.collective import Collective
from shoal.launcher.environment import Place
from shoal.memory.tracker import allocated
from shoal.planning.calibration import calibration_here
from shoal.runfile.run_file import RunFile

LR = 1e-4


def layouts(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file, of a dense GPT.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the file's.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Layouts of up to this many ranks of one thread.", min=2)] = 4,
    pairs: Annotated[int, typer.Option(help="Turns, in each of which every layout takes a step.", min=3)] = 15,
    as_json: AsJson = False,
) -> None:
    """A run in many layouts on this machine: seconds and bytes of a step, predicted beside measured, worst first.

    Example: python -m benchmarks.layouts recipes/stdlib-gpt.toml --pairs 5
    """
    keys = overrides or []
    if is_rank():
        run_as_rank(lambda place: measure(place, run_file, overrides=keys, pairs=pairs))
        return
    command = ["benchmarks.layouts", str(run_file), *keys, "--pairs", str(pairs)]
    calibration = calibration_here(os.environ)
    check_predictable(run_file, calibration, processes=processes, overrides=keys)
    measured = on_ranks(command, processes=processes)
    found, factor = compared(run_file, measured, calibration, overrides=keys)
    rows = [*rows_of(found), *constants(run_file, calibration, factor)]
    print_report("layouts", {"rows": rows, "checks": checks_of(found)}, as_json=as_json)


def measure(place: Place, path: Path, *, overrides: Sequence[str], pairs: int) -> dict[str, Any] | None:
    """Of each case of at most as many ranks: seconds of every turn, and each rank's peak. None but on rank 0."""
    store = join_store(place)
    cases = [case for case in CASES if case.ranks <= place.world_size]
    files = {case.name: run_file_of(path, case, overrides) for case in cases}
    places = {case.name: replace(place, world_size=case.ranks, local_world_size=case.ranks) for case in cases}
    clock = join_group("clock", place, store)
    peaks: dict[str, int] = {}
    sides: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:
        for name, run_file in files.items():
            takes_part, own = place.rank < places[name].world_size, PrefixStore(f"peak/{name}", store)
            peaks[name] = peak_bytes(run_file, places[name], own) if takes_part else 0
            clock.barrier().wait()
        for name, run_file in files.items():
            takes_part, own = place.rank < places[name].world_size, PrefixStore(f"time/{name}", store)
            sides[name] = _stepper(run_file, places[name], own, stack) if takes_part else _no_step
        turns = in_turn(sides, clock, turns=pairs)
    found = {
        name: {
            "seconds": quiet_median_s(turns[name]),
            "all_seconds": [turn.seconds for turn in turns[name]],
            "others": [turn.others_s for turn in turns[name]],
            "peak_bytes": _by_rank(clock, peak),
        }
        for name, peak in peaks.items()
    }
    return found if place.rank == 0 else None


def peak_bytes(run_file: RunFile, place: Place, store: Store) -> int:
    """Bytes of tensors at the peak of the second step: what was there before it, and the most that it adds."""
    with ExitStack() as stack:
        steppers: list[Callable[[], Any]] = []

        def begin() -> None:
            steppers.append(_stepper(run_file, place, store, stack))
            steppers[0]()

        before = allocated(begin)
        return before.stayed_bytes + allocated(steppers[0]).peak_bytes


def _stepper(run_file: RunFile, place: Place, store: Store, stack: ExitStack) -> Callable[[], Any]:
    """A step of the run, its data included."""
    training = start_training(run_file, place, stack, store=store)
    return lambda: training.take_step(lr=LR)


def _no_step() -> None:
    """The step of a rank that a layout does not use."""


def _by_rank(clock: Collective, own: int) -> list[int]:
    every = torch.zeros(clock.size, dtype=torch.int64)
    every[clock.rank] = own
    clock.all_reduce(every).wait()
    return every.tolist()


if __name__ == "__main__":
    run(layouts)
