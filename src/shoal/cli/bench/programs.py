"""`shoal bench programs`: plain PyTorch programs on Gloo, and on Shoal's backend by one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, names, sizes, worlds
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def programs(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a rank and step, several with commas; multiples of 128.")
    ] = "256,2048",
    pairs: Annotated[int, typer.Option(help="Turns of each program.", min=3)] = 20,
    processes: Annotated[str, typer.Option(help="Numbers of ranks, even for tensor; several with commas.")] = "2,4",
    only: Annotated[str, typer.Option(help="Of ddp, fsdp2, tensor; several with commas. Default: all.")] = "",
    as_json: AsJson = False,
) -> None:
    """DDP, FSDP2 and tensor parallelism of plain PyTorch: the same programs on Gloo and on backend "shoal".

    Example: shoal bench programs --tokens 256 --pairs 5 --processes 2 --only ddp
    """
    from shoal.recipes.benchmarks import machine
    from shoal.recipes.benchmarks.programs import PROGRAMS

    wanted, chosen = sizes(tokens), names(only, "--only", PROGRAMS)
    if machine.is_rank():
        as_rank(lambda place: _programs(place, chosen, wanted[0], pairs))
        return
    counts = worlds(processes)
    if "tensor" in chosen and (odd := [count for count in counts if count % 2]):
        raise typer.BadParameter(
            f"{odd[0]}; tensor parallelism takes pairs: give even numbers", param_hint="--processes"
        )
    results = [
        machine.on_ranks(
            ["bench", "programs", "--tokens", str(size), "--pairs", str(pairs), "--only", ",".join(chosen)],
            processes=count,
        )
        for count in counts
        for size in wanted
    ]
    show(
        "programs", [r for one in results for r in one["rows"]], [c for one in results for c in one["checks"]], as_json
    )


def _programs(place: Place, chosen: list[str], tokens: int, pairs: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.one_line import measure

    return measure(place, chosen, tokens=tokens, pairs=pairs)
