"""`shoal bench link`: slow links that this machine plays itself, and what goes over them.

    ledger     two hosts of one rank train in four layouts: the ledger's bytes beside the kernel's counters
    rate       two hosts of one rank: how much of a link's rate an all-reduce gets
    levels     two hosts of two ranks: a ring over all ranks beside a hierarchy, and the ratio of their closed forms
    topology   hosts and slow links that the probe has to find, and the orders of a ring and of a tree over them
    priority   two hosts of one rank: gradients that leave in order beside gradients that leave by priority

Every part has labs of its own, and its ranks measure it in one of them. With `--network kernel` hosts are network
namespaces with shaped links, which takes root; with `--network throttle` ranks wait instead, and the parts in
`KERNEL_ONLY` cannot be measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.bench.options import AsJson, names, numbers
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, merged, print_report
from shoal.errors import EnvironmentFault
from shoal.launcher.lab.lab_file import Lab, lab_from
from shoal.launcher.lab.network import why_not

if TYPE_CHECKING:
    from shoal.launcher.environment import Place

LEDGER_MBIT, LEVELS_MBIT, TOPOLOGY_MBIT, SLOW_MBIT, PRIORITY_MBIT = 200, 100, 100, 20, 1000
PARTS = ("ledger", "rate", "levels", "topology", "priority")
KERNEL_ONLY = {
    "ledger": "it compares the ledger with the kernel's counters, and a throttled host has no interface",
    "levels": "it needs ranks that share their host's link, and throttled ones have a link each",
    "topology": "its links have different rates, and a throttled rank has one rate to all other hosts",
}
"""The parts that a throttled lab would give wrong figures for, and why."""
GIGABIT = "gigabit"
"""The lab that is measured over real links and, under another name, throttled."""
NetworkKind = Literal["kernel", "throttle"]


def link(
    parts: Annotated[str, typer.Option(help="Of ledger, rate, levels, topology, priority; several, with commas.")] = "",
    mbit: Annotated[str, typer.Option(help="Rates of the part `rate`, Mbit/s, several with commas.")] = "100,400",
    lab: Annotated[str, typer.Option(help="One lab of a part, by name; default: all of them.")] = "",
    network: Annotated[
        str, typer.Option(help="kernel: real links, which takes root; throttle: ranks that wait, for few parts.")
    ] = "kernel",
    as_json: AsJson = False,
) -> None:
    """Slow links beside their closed forms: the ledger and the kernel's counters, rates, hierarchies, topologies.

    It needs root and iproute2, as hosts are network namespaces; `--network throttle` needs neither, approximately.

    Example: shoal bench link --parts rate --mbit 50
    """
    rates, kind = numbers(mbit, "--mbit", most=40_000), _network(network)
    wanted = _parts(parts, kind)
    if is_rank():
        run_as_rank(lambda place: measure(wanted[0], labs(wanted[0], rates, kind)[lab], place, name=lab))
        return
    chosen = _chosen(wanted, rates, kind, lab)
    _check_privileges([one for _, _, one in chosen])
    results = []
    for number, (part, name, one) in enumerate(chosen, 1):
        options = ["--parts", part, "--mbit", mbit, "--lab", name, "--network", kind]
        shown = f"{number} of {len(chosen)}: {part}, lab {name}"
        results.append(on_ranks(["shoal", "bench", "link", *options], processes=one.ranks, lab=one, part=shown))
    print_report("link", merged(results), as_json=as_json)


def labs(part: str, rates_mbit: list[int], network: NetworkKind = "kernel") -> dict[str, Lab]:
    """The labs of a part by name; with `throttle`, all of them throttled."""
    made = _labs(part, rates_mbit)
    if network == "kernel":
        return made
    return {name: replace(lab, network=network) for name, lab in made.items() if name != GIGABIT}


def measure(part: str, lab: Lab, place: Place, *, name: str) -> Result | None:
    """What a rank measures of `part` in the lab `name`; None on all ranks but rank 0."""
    from shoal.bench import link_measurements

    measurements = {
        "ledger": link_measurements.measure_ledger,
        "rate": link_measurements.measure_rate,
        "levels": link_measurements.measure_levels,
        "topology": link_measurements.measure_topology,
        "priority": link_measurements.measure_priority,
    }
    return measurements[part](lab, place, name=name)


def _labs(part: str, rates_mbit: list[int]) -> dict[str, Lab]:
    if part == "ledger":
        return {"two-hosts": _lab(hosts=2, rate_mbit=LEDGER_MBIT)}
    if part == "rate":
        return {f"{rate}-mbit": _lab(hosts=2, rate_mbit=rate) for rate in rates_mbit}
    if part == "levels":
        return {"two-by-two": _lab(hosts=2, ranks_per_host=2, rate_mbit=LEVELS_MBIT)}
    if part == "priority":
        return {
            GIGABIT: _lab(hosts=2, rate_mbit=PRIORITY_MBIT),
            f"{GIGABIT}-throttled": _lab(hosts=2, rate_mbit=PRIORITY_MBIT, network="throttle"),
        }
    slow = [{"between": [1, 2], "rate_mbit": SLOW_MBIT}]
    return {
        "three-hosts-of-two": _lab(hosts=3, ranks_per_host=2, rate_mbit=TOPOLOGY_MBIT),
        "detour": _lab(slow, hosts=3, ranks_per_host=[2, 1, 1], rate_mbit=TOPOLOGY_MBIT),
        "four-hosts-of-two": _lab(slow, hosts=4, ranks_per_host=2, rate_mbit=TOPOLOGY_MBIT),
        "torus-of-eight": _lab(_torus_links(2, 4), hosts=8, rate_mbit=SLOW_MBIT),
    }


def _torus_links(rows: int, columns: int) -> list[dict[str, Any]]:
    """Fast ones between the neighbours in a torus, host r x columns + c in row r and column c."""
    pairs = set[tuple[int, ...]]()
    for host in range(rows * columns):
        row, column = divmod(host, columns)
        for other in ((row + 1) % rows * columns + column, row * columns + (column + 1) % columns):
            pairs.add(tuple(sorted((host, other))))
    return [{"between": list(pair), "rate_mbit": TOPOLOGY_MBIT} for pair in sorted(pairs)]


def _lab(links: list[dict[str, Any]] | None = None, **table: Any) -> Lab:
    return lab_from({"lab": table, "link": links or []}, file="shoal bench link")


def _network(text: str) -> NetworkKind:
    """Raises `typer.BadParameter`."""
    if text not in ("kernel", "throttle"):
        raise typer.BadParameter(f"'{text}'; give kernel or throttle", param_hint="--network")
    return text


def _parts(text: str, network: NetworkKind) -> list[str]:
    """The parts that this network can show. Raises `typer.BadParameter` for others."""
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
    known = [(part, name, one) for part in parts for name, one in labs(part, rates, network).items()]
    chosen = [each for each in known if lab in ("", each[1])]
    if not chosen:
        raise typer.BadParameter(
            f"'{lab}'; the labs of {', '.join(parts)} are {', '.join(name for _, name, _ in known)}", param_hint="--lab"
        )
    return chosen


def _check_privileges(labs: list[Lab]) -> None:
    """Raises `EnvironmentFault` where one of `labs` needs real links and this process cannot make them."""
    reason = why_not() if any(lab.network == "kernel" for lab in labs) else None
    if reason is not None:
        raise EnvironmentFault(f"{reason}; in this benchmark that is --network throttle")
