"""`shoal bench link`: training and collectives over slow links, in a lab that this machine plays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, names, numbers
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place
    from shoal.launch.lab.lab_file import Lab
    from shoal.recipes.benchmarks.link import NetworkKind


def link(
    parts: Annotated[str, typer.Option(help="Of ledger, rate, levels, topology, priority; several, with commas.")] = "",
    mbit: Annotated[str, typer.Option(help="Rates of the part `rate`, Mbit/s, several with commas.")] = "100,400",
    lab: Annotated[str, typer.Option(help="One lab of a part, by name; default: all of them.")] = "",
    network: Annotated[
        str,
        typer.Option(help="kernel: real links, which takes root; throttle: ranks that wait, for few parts."),
    ] = "kernel",
    as_json: AsJson = False,
) -> None:
    """Slow links beside their closed forms: the ledger and the kernel's counters, rates, hierarchies, topologies.

    It needs root and iproute2, as hosts are network namespaces; `--network throttle` needs neither, approximately.

    Example: shoal bench link --parts rate --mbit 50
    """
    from shoal.recipes.benchmarks import machine

    rates, kind = _rates(mbit), _network(network)
    wanted = _parts(parts, kind)
    if machine.is_rank():
        as_rank(lambda place: _link(place, wanted[0], lab, rates, kind))
        return
    chosen = _chosen(wanted, rates, kind, lab)
    _require([one for _, _, one in chosen])
    results = []
    for part, name, one in chosen:
        arguments = ["bench", "link", "--parts", part, "--mbit", mbit, "--lab", name, "--network", kind]
        results.append(machine.on_ranks(arguments, processes=one.ranks, lab=one))
    show("link", [r for result in results for r in result["rows"]], [c for r in results for c in r["checks"]], as_json)


def _network(text: str) -> NetworkKind:
    """Raises `typer.BadParameter`."""
    if text not in ("kernel", "throttle"):
        raise typer.BadParameter(f"'{text}'; give kernel or throttle", param_hint="--network")
    return text


def _parts(text: str, network: NetworkKind) -> list[str]:
    """Those that can be on this network. Raises `typer.BadParameter` for others."""
    from shoal.recipes.benchmarks.link import KERNEL_ONLY, PARTS

    found = names(text, "--parts", PARTS)
    if network == "kernel":
        return found
    if text and (refused := [part for part in found if part in KERNEL_ONLY]):
        raise typer.BadParameter(
            f"'{refused[0]}': {KERNEL_ONLY[refused[0]]}; leave it out, or give --network kernel", param_hint="--parts"
        )
    return [part for part in found if part not in KERNEL_ONLY]


def _chosen(parts: list[str], rates: list[int], network: NetworkKind, lab: str) -> list[tuple[str, str, Lab]]:
    """(part, name, lab) of all labs to play. Raises `typer.BadParameter` where none of them is called `lab`."""
    from shoal.recipes.benchmarks.link import labs

    known = [(part, name, one) for part in parts for name, one in labs(part, rates, network).items()]
    chosen = [each for each in known if lab in ("", each[1])]
    if not chosen:
        raise typer.BadParameter(
            f"'{lab}'; the labs of {', '.join(parts)} are {', '.join(name for _, name, _ in known)}", param_hint="--lab"
        )
    return chosen


def _require(labs: list[Lab]) -> None:
    """Raises `EnvironmentFault` where one of `labs` needs what this process may not have."""
    from shoal.errors import EnvironmentFault
    from shoal.launch.lab.iproute import why_not

    reason = why_not() if any(lab.network == "kernel" for lab in labs) else None
    if reason is not None:
        raise EnvironmentFault(f"{reason}; in this benchmark that is --network throttle")


def _rates(text: str) -> list[int]:
    return numbers(text, "--mbit", most=40_000)


def _link(place: Place, part: str, name: str, rates: list[int], network: NetworkKind) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.link import labs, measure

    return measure(part, labs(part, rates, network)[name], place, name=name)
