"""`shoal bench comm`: collectives of many sizes over any backend, beside Gloo in the same run.

This module is the command: which collectives, sizes, backends and ranks there are. `collective_times` measures them.
Their fits, alpha and beta of each collective, go to this machine's calibration, from which `shoal plan` predicts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.bench.options import OPERATIONS, PEER, AsJson, Sweep, world_sizes
from shoal.bench.pictures import picture_path, write_picture
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import machine_facts, print_report
from shoal.errors import UsageError
from shoal.launcher.lab.lab_file import Lab, load_lab

if TYPE_CHECKING:
    from shoal.launcher.environment import Place
    from shoal.topology.calibration import Calibration


def comm(
    operations: Annotated[str, typer.Option(help="Collectives, with commas; default: all.")] = "",
    backends: Annotated[
        str,
        typer.Option(
            help="shm, hierarchical (in a lab), mpi, with commas; Gloo is always measured. Default: shm; in a lab "
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
        Path | None, typer.Option(help="Draw the bandwidths here (.png, .svg, .pdf).", callback=picture_path)
    ] = None,
    keep: Annotated[bool, typer.Option(help="Add the fits to this machine's calibration; a lab's never.")] = True,
    as_json: AsJson = False,
) -> None:
    """Size, time, algbw and busbw as nccl-tests prints them; alpha and beta are kept for `shoal plan`.

    Example: shoal bench comm --operations all_reduce --processes 2 --last 1048576
    """
    hosts = None if lab is None else load_lab(lab)
    counts = world_sizes(processes or "2,4") if hosts is None else [_ranks_of(hosts, processes)]
    placements = [(0,) * count for count in counts] if hosts is None else [hosts.host_of]
    chosen = _names(backends) or default_backends(placements[0])
    sweep = Sweep(_names(operations) or OPERATIONS, chosen, first, last, factor, turns, dtype)
    if is_rank():
        run_as_rank(lambda place: _measure(place, sweep))
        return
    for host_of in placements:
        check_hosts(chosen, host_of, lab=hosts is not None)
    command = ["shoal", "bench", "comm", *sweep.arguments()]
    mpi = "mpi" in chosen
    results = [
        on_ranks(command, processes=count, lab=hosts, mpi=mpi, part=f"collectives of {count} ranks") for count in counts
    ]
    rows = [row for result in results for row in result["rows"]]
    fits = [fit for result in results for fit in result["fits"]]
    if plot is not None:
        write_picture(rows, plot)
    path = _keep(fits) if keep and hosts is None else None
    print_report("comm", {"rows": [*rows, *map(_rounded, fits)], "checks": []}, as_json=as_json)
    if path is not None and not as_json:
        print(f"Kept: {path}")


def default_backends(host_of: Sequence[int]) -> tuple[str, ...]:
    """What is measured beside Gloo by default, from the host of each rank."""
    hosts = len(set(host_of))
    if hosts == 1:
        return ("shm",)
    return ("hierarchical",) if hosts < len(host_of) else (PEER,)


def check_hosts(backends: Sequence[str], host_of: Sequence[int], *, lab: bool) -> None:
    """Raises `UsageError` for a backend that ranks on these hosts, in a `lab` or not, cannot use."""
    ranks, hosts = len(host_of), len(set(host_of))
    where = f"{ranks} ranks on {hosts} {'host' if hosts == 1 else 'hosts'}"
    if "shm" in backends and hosts > 1:
        raise UsageError(f"--backends shm: these are {where}, and memory is shared on one; give hierarchical")
    if "hierarchical" in backends and not 1 < hosts < ranks:
        raise UsageError(
            f"--backends hierarchical: these are {where}, and two levels are several hosts, some with several ranks; "
            "give --lab with a file of such hosts (hosts = 2, ranks_per_host = 2)"
        )
    if "mpi" in backends and lab:
        raise UsageError("--backends mpi: mpiexec starts no ranks in a lab; leave out one of the two")


def calibration_of(fits: Sequence[dict[str, Any]]) -> Calibration:
    """A calibration of this machine that holds these fits alone."""
    from shoal.topology.calibration import Calibration, CollectiveFit

    facts = machine_facts()
    return Calibration(
        machine=f"{facts['processor']}, {facts['cores']} cores",
        torch=facts["torch"],
        collectives=tuple(CollectiveFit(**fit) for fit in fits),
    )


def _ranks_of(lab: Lab, processes: str) -> int:
    """The ranks of the lab. Raises `typer.BadParameter` where `processes` asks for another number."""
    if processes and world_sizes(processes) != [lab.ranks]:
        raise typer.BadParameter(
            f"'{processes}', and the lab has {lab.ranks} ranks; leave it out", param_hint="--processes"
        )
    return lab.ranks


def _keep(fits: Sequence[dict[str, Any]]) -> Path:
    from shoal.planning.calibration import add_calibration, calibration_path

    path = calibration_path(os.environ)
    add_calibration(path, calibration_of(fits))
    return path


def _measure(place: Place, sweep: Sweep) -> dict[str, Any] | None:
    from shoal.bench.collective_times import measure

    return measure(place, sweep)


def _rounded(fit: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fit.items()}


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
