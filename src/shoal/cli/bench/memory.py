"""`shoal bench memory`: what a rank of four keeps: model state, activations of long sequences, and with recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def memory(
    tokens: Annotated[int, typer.Option(help="Tokens of the long sequence; a multiple of 8.", min=64)] = 32768,
    pairs: Annotated[int, typer.Option(help="Paired steps with recomputation and without.", min=3)] = 15,
    as_json: AsJson = False,
) -> None:
    """What a rank of four keeps: model state under ZeRO, activations of a long sequence and under recomputation.

    Example: shoal bench memory --tokens 4096 --pairs 5
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        as_rank(lambda place: _memory(place, tokens, pairs))
        return
    if tokens % 8:
        raise typer.BadParameter(
            f"{tokens}; four ranks hold two equal parts each: give a multiple of 8", param_hint="--tokens"
        )
    arguments = ["bench", "memory", "--tokens", str(tokens), "--pairs", str(pairs)]
    result = machine.on_ranks(arguments, processes=4)
    show("memory", result["rows"], result["checks"], as_json)


def _memory(place: Place, tokens: int, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.memory import measure

    return measure(place, tokens=tokens, pairs=pairs)
