"""`shoal bench layouts`: seconds and bytes of a run's step in many layouts, beside their predictions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


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

    Example: shoal bench layouts recipes/stdlib-gpt.toml --pairs 5
    """
    from shoal.recipes.benchmarks import machine

    keys = overrides or []
    if machine.is_rank():
        as_rank(lambda place: _measure(place, run_file, keys, pairs))
        return
    from shoal.planning.operators import calibration_here
    from shoal.recipes.benchmarks.layouts_beside import checks, rows
    from shoal.recipes.benchmarks.layouts_predicted import check_predicted, constants, predicted

    arguments = ["bench", "layouts", str(run_file), *keys, "--pairs", str(pairs)]
    calibration = calibration_here(os.environ)
    check_predicted(run_file, calibration, processes=processes, overrides=keys)
    found = machine.on_ranks(arguments, processes=processes)
    beside, factor = predicted(run_file, found, calibration, overrides=keys)
    show("layouts", [*rows(beside), *constants(run_file, calibration, factor)], checks(beside), as_json)


def _measure(place: Place, run_file: Path, overrides: list[str], pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.layouts import measure

    return measure(place, run_file, overrides=overrides, pairs=pairs)
