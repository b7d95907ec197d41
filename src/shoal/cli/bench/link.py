"""`shoal bench link`: training and collectives over slow links, in a lab that this machine plays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, numbers
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def link(
    parts: Annotated[str, typer.Option(help="Of ledger, rate, levels, topology, priority; several, with commas.")] = "",
    mbit: Annotated[str, typer.Option(help="Rates of the part `rate`, Mbit/s, several with commas.")] = "100,400",
    lab: Annotated[str, typer.Option(help="One lab of a part, by name; default: all of them.")] = "",
    as_json: AsJson = False,
) -> None:
    """Slow links beside their closed forms: the ledger and the kernel's counters, rates, hierarchies, topologies.

    It needs root and iproute2: hosts are network namespaces.

    Example: shoal bench link --parts rate --mbit 50
    """
    from shoal.launch.lab.iproute import require
    from shoal.recipes.benchmarks import machine
    from shoal.recipes.benchmarks.link import PARTS, labs

    rates, wanted = _rates(mbit), [part for part in parts.split(",") if part] or list(PARTS)
    if unknown := [part for part in wanted if part not in PARTS]:
        raise typer.BadParameter(f"'{unknown[0]}'; the parts are {', '.join(PARTS)}", param_hint="--parts")
    if machine.is_rank():
        as_rank(lambda place: _link(place, wanted[0], lab, rates))
        return
    require()
    results = []
    for part in wanted:
        for name, one in labs(part, rates).items():
            if lab in ("", name):
                arguments = ["bench", "link", "--parts", part, "--mbit", mbit, "--lab", name]
                results.append(machine.on_ranks(arguments, processes=one.ranks, lab=one))
    show("link", [r for result in results for r in result["rows"]], [c for r in results for c in r["checks"]], as_json)


def _rates(text: str) -> list[int]:
    return numbers(text, "--mbit", most=40_000)


def _link(place: Place, part: str, name: str, rates: list[int]) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.link import labs, measure

    return measure(part, labs(part, rates)[name], place, name=name)
