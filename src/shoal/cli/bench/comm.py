"""`shoal bench comm`: collectives of many sizes over any backend, beside Gloo, and their latency and bandwidth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, worlds
from shoal.cli.bench.show import show
from shoal.cli.output import picture_file

if TYPE_CHECKING:
    from shoal.launch.lab.lab_file import Lab


def comm(
    operations: Annotated[str, typer.Option(help="Collectives, with commas; default: all.")] = "",
    backends: Annotated[
        str,
        typer.Option(
            help="shm, hierarchical (in a lab), mpi, with commas; Gloo is always there. Default: shm; in a lab "
            "hierarchical."
        ),
    ] = "",
    first: Annotated[int, typer.Option(help="Smallest size, bytes.", min=1)] = 1 << 10,
    last: Annotated[int, typer.Option(help="Largest size, bytes.", min=1)] = 16 << 20,
    factor: Annotated[int, typer.Option(help="From one size to the next.", min=2)] = 4,
    turns: Annotated[int, typer.Option(help="Turns of each size, of which the median counts.", min=3)] = 10,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16, float16 or int64.")] = "float32",
    processes: Annotated[
        str, typer.Option(help="Numbers of ranks, several with commas. Default: 2,4; in a lab its ranks.")
    ] = "",
    lab: Annotated[
        Path | None, typer.Option("--lab", metavar="LAB.toml", help="Measure on the hosts and links of a lab file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the bandwidths here (.png, .svg, .pdf).", callback=picture_file)
    ] = None,
    keep: Annotated[bool, typer.Option(help="Add the fits to this machine's calibration; a lab's never.")] = True,
    as_json: AsJson = False,
) -> None:
    """Size, time, algbw and busbw as nccl-tests prints them; alpha and beta are kept for `shoal plan`.

    Example: shoal bench comm --operations all_reduce --processes 2 --last 1048576
    """
    from shoal.recipes.benchmarks import machine
    from shoal.recipes.benchmarks.comm_options import OPERATIONS, Sweep, check_hosts, default_backends

    hosts = _lab(lab)
    counts = worlds(processes or "2,4") if hosts is None else [_ranks_of(hosts, processes)]
    places = [(0,) * count for count in counts] if hosts is None else [hosts.host_of]
    chosen = _names(backends) or default_backends(places[0])
    sweep = Sweep(_names(operations) or OPERATIONS, chosen, first, last, factor, turns, dtype)
    if machine.is_rank():
        as_rank(lambda place: _comm(place, sweep))
        return
    for host_of in places:
        check_hosts(chosen, host_of, lab=hosts is not None)
    arguments = ["bench", "comm", *sweep.arguments()]
    results = [machine.on_ranks(arguments, processes=count, lab=hosts, mpi="mpi" in chosen) for count in counts]
    rows = [row for result in results for row in result["rows"]]
    if plot is not None:
        from shoal.recipes.benchmarks.comm_picture import write_picture

        write_picture(rows, plot)
    kept = _keep(results) if keep and hosts is None else None
    show("comm", [*rows, *(_shown(fit) for result in results for fit in result["fits"])], [], as_json)
    if kept is not None and not as_json:
        print(f"Kept: {kept}")


def _lab(path: Path | None) -> Lab | None:
    from shoal.launch.lab.lab_file import load_lab

    return None if path is None else load_lab(path)


def _ranks_of(lab: Lab, processes: str) -> int:
    """All of the lab's. Raises `typer.BadParameter` where others are asked for."""
    if processes and worlds(processes) != [lab.ranks]:
        raise typer.BadParameter(
            f"'{processes}', and the lab has {lab.ranks} ranks; leave it out", param_hint="--processes"
        )
    return lab.ranks


def _comm(place: Any, sweep: Any) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.comm import measure

    return measure(place, sweep)


def _keep(results: list[dict[str, Any]]) -> Path:
    from shoal.planning.cluster_here import add_calibration, calibration_path
    from shoal.recipes.benchmarks.comm import calibration_of

    path = calibration_path(os.environ)
    add_calibration(path, calibration_of(results))
    return path


def _shown(fit: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fit.items()}


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
