"""`shoal bench pipeline`: the bubble of each schedule, activations in flight, and how even the automatic cut is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def pipeline(
    repeats: Annotated[int, typer.Option(help="Passes of each schedule, of which the median counts.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Pipelines of four ranks: bubble of each schedule, activations in flight, and how even the automatic cut is.

    Example: shoal bench pipeline --repeats 1
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        as_rank(lambda place: _pipeline(place, repeats))
        return
    result = machine.on_ranks(["bench", "pipeline", "--repeats", str(repeats)], processes=4)
    show("pipeline", result["rows"], result["checks"], as_json)


def _pipeline(place: Place, repeats: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.pipeline import measure

    return measure(place, repeats=repeats)
