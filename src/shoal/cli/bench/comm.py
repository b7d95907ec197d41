"""`shoal bench comm`: collectives of many sizes over any backend, beside Gloo, and their latency and bandwidth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, worlds
from shoal.cli.bench.show import show
from shoal.cli.output import picture_file


def comm(
    operations: Annotated[str, typer.Option(help="Collectives, with commas; default: all.")] = "",
    backends: Annotated[str, typer.Option(help="shm, hierarchical, mpi, with commas; Gloo is always there.")] = "shm",
    first: Annotated[int, typer.Option(help="Smallest size, bytes.", min=1)] = 1 << 10,
    last: Annotated[int, typer.Option(help="Largest size, bytes.", min=1)] = 16 << 20,
    factor: Annotated[int, typer.Option(help="From one size to the next.", min=2)] = 4,
    turns: Annotated[int, typer.Option(help="Turns of each size, of which the median counts.", min=3)] = 10,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16, float16 or int64.")] = "float32",
    processes: Annotated[str, typer.Option(help="Numbers of ranks, several with commas.")] = "2,4",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the bandwidths here (.png, .svg, .pdf).", callback=picture_file)
    ] = None,
    keep: Annotated[bool, typer.Option(help="Add the fits to this machine's calibration.")] = True,
    as_json: AsJson = False,
) -> None:
    """Size, time, algbw and busbw as nccl-tests prints them; alpha and beta are kept for `shoal plan`.

    Example: shoal bench comm --operations all_reduce --processes 2 --last 1048576
    """
    from shoal.recipes.benchmarks import machine
    from shoal.recipes.benchmarks.comm_options import OPERATIONS, Sweep

    sweep = Sweep(_names(operations) or OPERATIONS, _names(backends), first, last, factor, turns, dtype)
    if machine.is_rank():
        as_rank(lambda place: _comm(place, sweep))
        return
    arguments = ["bench", "comm", *sweep.arguments()]
    results = [machine.on_ranks(arguments, processes=count) for count in worlds(processes)]
    rows = [row for result in results for row in result["rows"]]
    if plot is not None:
        from shoal.recipes.benchmarks.comm_picture import write_picture

        write_picture(rows, plot)
    kept = _keep(results) if keep else None
    show("comm", [*rows, *(_shown(fit) for result in results for fit in result["fits"])], [], as_json)
    if kept is not None and not as_json:
        print(f"Kept: {kept}")


def _comm(place: Any, sweep: Any) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.comm import measure

    return measure(place, sweep)


def _keep(results: list[dict[str, Any]]) -> Path:
    from shoal.recipes.benchmarks.comm import calibration_of
    from shoal.recipes.planning.calibration_file import add_calibration, calibration_path

    path = calibration_path(os.environ)
    add_calibration(path, calibration_of(results))
    return path


def _shown(fit: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fit.items()}


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
