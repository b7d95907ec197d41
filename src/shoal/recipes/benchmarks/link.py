"""`shoal bench link`: slow links that the machine plays itself, and what goes over them.

    ledger     two hosts of one rank train in four layouts: what the ledger says, and what the kernel counted
    rate       two hosts of one rank: how much of a link's rate an all-reduce gets
    levels     two hosts of two ranks: a ring over all ranks, and the hierarchy, beside the ratio of their closed forms
    topology   hosts and slow links that the probe has to find, and the order of a ring over them
    priority   two hosts of one rank: steps whose gradients leave in order, and by priority

Every part has labs of its own; ranks hand in rows and checks. The kernel's counters are those of the hosts' interfaces.
Where hosts are names only (`network = "throttle"`) some parts cannot be: `KERNEL_ONLY`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from shoal.launch.environment import Place
from shoal.launch.lab.lab_file import Lab, lab_from
from shoal.recipes.benchmarks.machine import Result

LEDGER_MBIT, LEVELS_MBIT, TOPOLOGY_MBIT, SLOW_MBIT, PRIORITY_MBIT = 200, 100, 100, 20, 1000
PARTS = ("ledger", "rate", "levels", "topology", "priority")
PLAYED_TWICE = "gigabit"
"""A lab that has a throttled twin."""
KERNEL_ONLY = {
    "ledger": "it compares the ledger with the kernel's counters, and a throttled host has no interface",
    "levels": "it needs ranks that share their host's link, and throttled ones have a link each",
    "topology": "its links have different rates, and a throttled rank has one rate to all other hosts",
}
"""Parts that a throttled lab would give wrong figures for, and why."""
NetworkKind = Literal["kernel", "throttle"]


def labs(part: str, rates_mbit: list[int], network: NetworkKind = "kernel") -> dict[str, Lab]:
    """The labs of a part by name; all of them throttled where `network` says so."""
    made = _labs(part, rates_mbit)
    if network == "kernel":
        return made
    return {name: replace(lab, network=network) for name, lab in made.items() if name != PLAYED_TWICE}


def _labs(part: str, rates_mbit: list[int]) -> dict[str, Lab]:
    if part == "ledger":
        return {"two-hosts": _lab(hosts=2, rate_mbit=LEDGER_MBIT)}
    if part == "rate":
        return {f"{rate}-mbit": _lab(hosts=2, rate_mbit=rate) for rate in rates_mbit}
    if part == "levels":
        return {"two-by-two": _lab(hosts=2, ranks_per_host=2, rate_mbit=LEVELS_MBIT)}
    if part == "priority":
        return {
            PLAYED_TWICE: _lab(hosts=2, rate_mbit=PRIORITY_MBIT),
            f"{PLAYED_TWICE}-throttled": _lab(hosts=2, rate_mbit=PRIORITY_MBIT, network="throttle"),
        }
    slow = [{"between": [1, 2], "rate_mbit": SLOW_MBIT}]
    return {
        "three-hosts-of-two": _lab(hosts=3, ranks_per_host=2, rate_mbit=TOPOLOGY_MBIT),
        "detour": _lab(slow, hosts=3, ranks_per_host=[2, 1, 1], rate_mbit=TOPOLOGY_MBIT),
        "four-hosts-of-two": _lab(slow, hosts=4, ranks_per_host=2, rate_mbit=TOPOLOGY_MBIT),
    }


def measure(part: str, lab: Lab, place: Place, *, name: str) -> Result | None:
    """What a rank of `lab` does; rank 0 has the result."""
    from shoal.recipes.benchmarks import link_ledger, link_levels, link_priority, link_rate, link_topology

    parts: Mapping[str, Callable[..., Result | None]] = {
        "ledger": link_ledger.measure,
        "rate": link_rate.measure,
        "levels": link_levels.measure,
        "topology": link_topology.measure,
        "priority": link_priority.measure,
    }
    return parts[part](lab, place, name=name, environ=os.environ)


def _lab(links: list[dict[str, Any]] | None = None, **table: Any) -> Lab:
    return lab_from({"lab": table, "link": links or []}, file="shoal bench link")
