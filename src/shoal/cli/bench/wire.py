"""`shoal bench wire`: collectives over shared memory beside Gloo, and beside what copying and adding allow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, worlds
from shoal.cli.bench.show import show
from shoal.cli.output import picture_file

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def wire(
    pairs: Annotated[int, typer.Option(help="Paired turns of each case.", min=3)] = 20,
    processes: Annotated[str, typer.Option(help="Numbers of ranks, several with commas.")] = "2,4",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the ratios here (.png, .svg, .pdf).", callback=picture_file)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shared memory beside Gloo: collectives of several sizes, and the bound that copying and adding allow.

    Example: shoal bench wire --pairs 5 --processes 2
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        as_rank(lambda place: _wire(place, pairs))
        return
    counts = worlds(processes)
    results = [machine.on_ranks(["bench", "wire", "--pairs", str(pairs)], processes=world) for world in counts]
    rows = [row for result in results for row in result["rows"]]
    if plot is not None:
        from shoal.recipes.benchmarks.comm_picture import write_wire_picture

        write_wire_picture(rows, plot)
    show("wire", rows, [c for result in results for c in result["checks"]], as_json)


def _wire(place: Place, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.wire import measure

    return measure(place, pairs=pairs)
