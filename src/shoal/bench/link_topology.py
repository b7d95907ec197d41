"""Planted topologies: does the probe find them, and does it order the ring well?

Ranks are renumbered at random, so that their numbers say nothing about their hosts. The probe sees only messages, and
what it finds is compared with the lab's file. The order of the ring is compared with the best of all orders: by the
seconds that the planted links would take (`pace`), and with few ranks by the measured time of an all-reduce in each.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from itertools import permutations

import torch

from shoal.bench.groups import CPU, gathered, join_group, join_store, while_counting
from shoal.bench.report import Result, check
from shoal.bench.turns import interleaved
from shoal.collectives import ring
from shoal.collectives.table import CollectiveTable, relabelled
from shoal.comm.algorithms import execute
from shoal.comm.algorithms.probe import probe
from shoal.comm.collective import Collective
from shoal.comm.volume import HEADER_BYTES
from shoal.cost.walk import bytes_between
from shoal.launch.environment import Place
from shoal.launch.lab.lab_file import Lab
from shoal.topology.links import SLOW, Links, best_order, pace, slow_links

PROBE_BYTES, REPEATS = 256 << 10, 7
RING_BYTES, TURNS = 2 << 20, 3
INNER_BYTES_S = 1e9
WITHIN, BYTES_WITHIN = 1.05, 0.03
FEW_RANKS = 4


def measure_topology(lab: Lab, place: Place, *, name: str) -> Result | None:
    """One row a lab.

    In the lab "detour" the link between two hosts is so slow that a ring should pass through the third host twice.
    """
    store, numbers = join_store(place), shuffled(lab.ranks)
    mine = numbers[place.rank]
    clock = join_group("clock", place, store, transport="gloo", rank=mine)
    group = join_group("measured", place, store, transport="gloo", rank=mine)
    planted = planted_links(lab, numbers)
    found = probe(group, device=CPU, size_bytes=PROBE_BYTES, repeats=REPEATS)
    order = best_order(found, size=RING_BYTES / lab.ranks)
    timed = _times_by_order(group, clock) if lab.ranks <= FEW_RANKS else {}
    sent = _bytes_ratio(order, group, clock, planted, leads=place.local_rank == 0)
    return _result(name, planted, found, order, timed, sent) if place.rank == 0 else None


def shuffled(ranks: int) -> list[int]:
    """The new number of each rank; all ranks draw the same."""
    numbers = list(range(ranks))
    random.Random(1).shuffle(numbers)
    return numbers


def planted_links(lab: Lab, numbers: Sequence[int]) -> Links:
    """The lab's rates between ranks under their new `numbers`. Hosts are numbered by first appearance."""
    lab_host = [lab.host_of[numbers.index(number)] for number in range(lab.ranks)]
    known = {host: index for index, host in enumerate(dict.fromkeys(lab_host))}
    bytes_s = lab.bytes_s()
    rates = tuple(tuple(INNER_BYTES_S if a == b else bytes_s[a][b] for b in lab_host) for a in lab_host)
    nothing = tuple((0.0,) * lab.ranks for _ in range(lab.ranks))
    return Links(nothing, rates, tuple(known[host] for host in lab_host))


def _times_by_order(group: Collective, clock: Collective) -> dict[tuple[int, ...], float]:
    """The median seconds of a ring all-reduce in every order."""
    tensor = torch.zeros(RING_BYTES // 4)
    orders = [(0, *rest) for rest in permutations(range(1, group.size))]
    tables = {order: relabelled(ring.all_reduce(group.size), order) for order in orders}
    sides = {str(order): _all_reduce(tensor, table, group) for order, table in tables.items()}
    turns = interleaved(sides, clock, pairs=TURNS, always=tuple(sides))
    return {order: statistics.median(turn[str(order)] for turn in turns) for order in orders}


def _all_reduce(tensor: torch.Tensor, table: CollectiveTable, group: Collective) -> Callable[[], None]:
    return lambda: execute.all_reduce(tensor, table, group, tag=7)


def _bytes_ratio(order: Sequence[int], group: Collective, clock: Collective, planted: Links, *, leads: bool) -> float:
    """Payload that the kernel counted between hosts in a ring of this order, over the closed form.

    One rank of each host `leads`: it contributes what the host's interfaces counted.
    """
    tensor, table = torch.zeros(RING_BYTES // 4), relabelled(ring.all_reduce(group.size), order)
    counted = while_counting(clock, _all_reduce(tensor, table, group))
    payload = counted.bytes_sent - HEADER_BYTES * counted.packets_sent
    whole = sum(row[0] for row in gathered(clock, [payload if leads else 0.0]))
    return whole / bytes_between(table, tensor.nbytes, planted.hosts)


def _result(
    name: str, planted: Links, found: Links, order: Sequence[int], timed: dict[tuple[int, ...], float], sent: float
) -> Result:
    paces = {o: pace(planted, o, size=RING_BYTES / planted.ranks)[0] for o in _orders(planted.ranks)}
    ratio = paces[tuple(order)] / min(paces.values())
    row = {
        "part": "topology",
        "topology": name,
        "ranks": planted.ranks,
        "hosts_planted": list(planted.hosts),
        "hosts_found": list(found.hosts),
        "slow_planted": slow_links(planted),
        "slow_found": slow_links(found),
        "order": list(order),
        "pace_to_best": round(ratio, 4),
        "pace_worst_to_best": round(max(paces.values()) / min(paces.values()), 4),
        "kernel_to_closed_form": round(sent, 4),
    }
    same = row["hosts_planted"] == row["hosts_found"] and row["slow_planted"] == row["slow_found"]
    checks = [
        check(f"{name}: hosts and slow links found (slow: less than 1/{SLOW:g} of the best)", float(same), 1.0),
        check(f"{name}: the ring's order against the best of all", ratio, WITHIN, at_most=True),
        check(f"{name}: bytes between hosts against the closed form", abs(sent - 1), BYTES_WITHIN, at_most=True),
    ]
    if timed:
        measured = timed[tuple(order)] / min(timed.values())
        row["seconds_by_order"] = {" ".join(map(str, o)): round(seconds, 4) for o, seconds in timed.items()}
        checks.append(check(f"{name}: measured time of that order against the best", measured, WITHIN, at_most=True))
    return {"rows": [row], "checks": checks}


def _orders(ranks: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in permutations(range(1, ranks))]
