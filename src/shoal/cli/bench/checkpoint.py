"""`shoal bench checkpoint`: what a save holds up, beside a blocking torch.save and fsync of the same state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, Processes
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def checkpoint(
    saves: Annotated[int, typer.Option(help="Saves of each kind.", min=2)] = 10,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """What a save holds up, beside a blocking torch.save and fsync of the same state.

    Example: shoal bench checkpoint --saves 5
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        as_rank(lambda place: _checkpoint(place, saves))
        return
    result = machine.on_ranks(["bench", "checkpoint", "--saves", str(saves)], processes=processes)
    show("checkpoint", [result["row"]], result["checks"], as_json)


def _checkpoint(place: Place, saves: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.checkpoint import measure

    return measure(place, saves=saves)
