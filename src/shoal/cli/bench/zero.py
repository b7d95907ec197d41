"""`shoal bench zero`: steps of ZeRO-1 and -2 beside DDP, of ZeRO-3 beside a hand-written fully_shard script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import FEWEST_PAIRS, AsJson, Processes
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def zero(
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and step; a multiple of 128.", min=128)] = 256,
    pairs: Annotated[int, typer.Option(help="Paired steps.", min=6)] = FEWEST_PAIRS,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps of ZeRO-1 and -2 beside DDP, of ZeRO-3 beside a hand-written fully_shard script.

    Example: shoal bench zero --pairs 20
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        as_rank(lambda place: _zero(place, tokens, pairs))
        return
    arguments = ["bench", "zero", "--tokens", str(tokens), "--pairs", str(pairs)]
    result = machine.on_ranks(arguments, processes=processes)
    show("zero", result["rows"], result["checks"], as_json)


def _zero(place: Place, tokens: int, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.zero import measure

    return measure(place, tokens=tokens, pairs=pairs)
