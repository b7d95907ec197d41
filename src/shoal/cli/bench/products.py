"""`shoal bench products`: what ranks of this machine compute and copy, kept for predictions."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, worlds
from shoal.cli.bench.show import show


def products(
    processes: Annotated[
        str, typer.Option(help="Numbers of ranks at once, several with commas; 1 is the peer.")
    ] = "1,2,4",
    as_json: AsJson = False,
) -> None:
    """Matrix products, operators and copies of 1 to N ranks at once; kept as this machine's calibration.

    Example: shoal bench products --processes 1,2
    """
    from shoal.planning.cluster_here import calibration_path
    from shoal.recipes.benchmarks import machine
    from shoal.recipes.benchmarks.products import kept, measure, rows

    if machine.is_rank():
        as_rank(measure)
        return
    counts = worlds(processes, least=1)
    if 1 not in counts:
        raise typer.BadParameter(f"'{processes}'; give numbers of ranks, 1 among them", param_hint="--processes")
    results = [machine.on_ranks(["bench", "products"], processes=count) for count in counts]
    path = calibration_path(os.environ)
    calibration = kept(results, path)
    show("products", list(rows(calibration.products)), [], as_json)
    if not as_json:
        print(f"Kept: {path}")
