"""`shoal bench check`: steps in which ranks compare their collectives, beside steps in which they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, Processes
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def check(
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and step; a multiple of 128.", min=128)] = 256,
    pairs: Annotated[int, typer.Option(help="Turns of each case.", min=3)] = 40,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps with wire.check_collectives on, off, and off again: over Gloo and shared memory, in three layouts.

    Example: shoal bench check --pairs 10
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        as_rank(lambda place: _check(place, tokens, pairs))
        return
    arguments = ["bench", "check", "--tokens", str(tokens), "--pairs", str(pairs)]
    result = machine.on_ranks(arguments, processes=processes)
    show("check", result["rows"], result["checks"], as_json)


def _check(place: Place, tokens: int, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.check_cost import measure

    return measure(place, tokens=tokens, pairs=pairs)
