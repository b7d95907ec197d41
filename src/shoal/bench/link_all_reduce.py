"""All-reduces over slow links: how much of a link's rate they get, and a ring beside a hierarchy of two levels.

The rate: a large all-reduce of S bytes among n ranks sends 2 (n-1)/n S bytes each way. Headers alone cost
1 - 1448/1514 = 4.4 % of the rate. Gloo's ring works in segments of at most 1 MiB, the first of which must arrive before
another can come back: with 50 segments that costs some 2 %, with 12 more than 5 %.

Two levels: over a host's link go, each way, of S bytes, with n ranks on m hosts numbered host by host,

    ring         2 (n-1)/n S       one rank of the host has its neighbour on another host
    two levels   2 (m-1)/m S       the host's sum, in a ring over hosts
    ratio        m (n-1) / n (m-1) = 3/2 for 2 x 2

Where the link is slow, the times have the same ratio. It is measured twice: between the backends (Gloo's ring, and
shared memory inside hosts with leaders between them), and between the tables of `shoal.collectives` over one backend.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.bench.groups import gathered, join_group, join_store, while_counting
from shoal.bench.pairs import Turns, ratios
from shoal.bench.report import Check, Result, check
from shoal.bench.turns import interleaved, slowest
from shoal.collectives import ring, two_level
from shoal.comm.algorithms import execute
from shoal.comm.ledger import Ledger
from shoal.comm.volume import bytes_sent, wire_bytes
from shoal.launch.environment import Place
from shoal.launch.lab.lab_file import MBIT_BYTES, Lab

RATE_SECONDS, RATE_TURNS, RATE_SHARE = 2.5, 3, 0.9
LEVELS_SECONDS, LEVELS_TURNS = 1.5, 3
WITHIN, BYTES_WITHIN = 0.15, 0.03
PEERS = {"hierarchical": "gloo", "hierarchical table": "ring table"}
TAG = 7


def measure_rate(lab: Lab, place: Place, *, name: str) -> Result | None:
    """One row: all-reduces that take some seconds each."""
    store = join_store(place)
    clock = join_group("clock", place, store, transport="gloo")
    group = join_group("measured", place, store, transport="gloo")
    mbit = lab.rate_mbit(0, 1)
    rate = mbit * MBIT_BYTES
    tensor = torch.zeros(int(rate * RATE_SECONDS / 4))
    times = [slowest(lambda: group.all_reduce(tensor).wait(), clock) for _ in range(RATE_TURNS + 1)][1:]
    if place.rank != 0:
        return None
    sent = bytes_sent("all_reduce", tensor.nbytes, size=group.size, backend="gloo")
    share = sent / statistics.median(times) / rate
    row = {
        "part": "rate",
        "mbit": mbit,
        "bytes": tensor.nbytes,
        "seconds": round(statistics.median(times), 4),
        "all_seconds": [round(seconds, 4) for seconds in times],
        "share_of_rate": round(share, 4),
        "share_with_headers": round(share * wire_bytes(sent) / sent, 4),
    }
    return {"rows": [row], "checks": [check(f"share of {mbit:g} Mbit/s that arrives", share, RATE_SHARE)]}


def measure_levels(lab: Lab, place: Place, *, name: str) -> Result | None:
    """A row for each side; checks of times and bytes against the closed forms."""
    store, hosts, ranks = join_store(place), len(lab.hosts), lab.ranks
    clock, ledger = join_group("clock", place, store, transport="gloo"), Ledger()
    gloo = join_group("gloo", place, store, transport="gloo", ledger=ledger)
    levels = join_group("levels", place, store, transport="hierarchical", ledger=ledger)
    tensor = torch.zeros(int(lab.rate_mbit(0, 1) * MBIT_BYTES * LEVELS_SECONDS / 4))
    tables = {"ring table": ring.all_reduce(ranks), "hierarchical table": two_level.hierarchical(ranks // hosts, hosts)}
    sides: dict[str, Callable[[], Any]] = {
        "gloo": lambda: gloo.all_reduce(tensor).wait(),
        "hierarchical": lambda: levels.all_reduce(tensor).wait(),
        "ring table": lambda: execute.all_reduce(tensor, tables["ring table"], gloo, tag=TAG),
        "hierarchical table": lambda: execute.all_reduce(tensor, tables["hierarchical table"], gloo, tag=TAG),
    }
    turns = interleaved(sides, clock, pairs=LEVELS_TURNS, always=tuple(sides))
    counts = {}
    for side, step in sides.items():
        ledger.take()
        interface = while_counting(clock, step)
        ledger_bytes = sum(entry.between_bytes for entry in ledger.take().values())
        counts[side] = gathered(clock, [ledger_bytes, interface.bytes_sent])
    if place.rank != 0:
        return None
    forms = {side: closed_form(side, tensor.nbytes, ranks=ranks, hosts=hosts) for side in sides}
    rows = [_levels_row(side, turns, counts[side], forms[side], lab, tensor.nbytes) for side in sides]
    return {"rows": rows, "checks": _levels_checks(turns, rows, forms)}


def closed_form(side: str, size_bytes: int, *, ranks: int, hosts: int) -> float:
    """Bytes that leave one host."""
    n = hosts if side.startswith("hierarchical") else ranks
    return 2 * (n - 1) / n * size_bytes


def _levels_row(
    side: str, turns: Turns, counts: list[list[float]], form: float, lab: Lab, size_bytes: int
) -> dict[str, Any]:
    first = lab.hosts[0]
    return {
        "part": "levels",
        "side": side,
        "bytes": size_bytes,
        "seconds": round(statistics.median(turn[side] for turn in turns), 4),
        "closed_form_bytes": int(form),
        "ledger_bytes": int(sum(counts[rank][0] for rank in first.ranks)),
        "interface_bytes": int(counts[first.ranks.start][1]),
    }


def _levels_checks(turns: Turns, rows: list[dict[str, Any]], forms: Mapping[str, float]) -> list[Check]:
    checks = []
    for side, peer in PEERS.items():
        gained, form = statistics.median(ratios(turns, side, peer=peer)), forms[peer] / forms[side]
        name = f"{side} beside {peer}: {gained:.3f} times as fast, the bytes' ratio is {form:.3f}; distance"
        checks.append(check(name, abs(gained / form - 1), WITHIN, at_most=True))
    for row in rows:
        off = max(abs(row[key] / row["closed_form_bytes"] - 1) for key in ("ledger_bytes", "interface_bytes"))
        name = f"{row['side']}: bytes between hosts against the closed form"
        checks.append(check(name, off, BYTES_WITHIN, at_most=True))
    return checks
