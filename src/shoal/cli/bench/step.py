"""`shoal bench step`: a training step beside the same step in a hand-written DDP script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import FEWEST_PAIRS, AsJson, Processes, sizes
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def step(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a rank and step, several with commas; multiples of 128.")
    ] = "256,2048",
    pairs: Annotated[
        int | None, typer.Option(help="Paired steps for each; default: 100, more where steps are short.", min=6)
    ] = None,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """A training step beside the same step in a hand-written DDP script.

    Example: shoal bench step --tokens 256 --pairs 20
    """
    from shoal.recipes.benchmarks import machine

    wanted = sizes(tokens)
    if machine.is_rank():
        as_rank(lambda place: _step(place, wanted[0], pairs or FEWEST_PAIRS))
        return
    results = []
    for size in wanted:
        count = pairs or max(FEWEST_PAIRS, min(4 * FEWEST_PAIRS, FEWEST_PAIRS * 1024 // size))
        arguments = ["bench", "step", "--tokens", str(size), "--pairs", str(count)]
        results.append(machine.on_ranks(arguments, processes=processes))
    show("step", [r["row"] for r in results], [c for r in results for c in r["checks"]], as_json)


def _step(place: Place, tokens: int, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.step import measure

    return measure(place, tokens=tokens, pairs=pairs, alone=max(5, pairs // 5))
