"""Two hosts of two ranks: an all-reduce in a ring over all ranks, and on two levels.

Over a host's link go, each way, of S bytes, with n ranks on m hosts numbered host by host:

    ring         2 (n-1)/n S       one rank of the host has its neighbour elsewhere
    two levels   2 (m-1)/m S       the host's sum, in a ring over hosts
    ratio        m (n-1) / n (m-1) = 3/2 for 2 x 2

Where the link is slow the times have the same ratio. It is measured twice: between the backends (Gloo's ring, and
shared memory inside hosts with leaders between), and between the tables of `shoal.collectives` over the same messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.collectives import ring, two_level
from shoal.comm.algorithms import execute
from shoal.comm.ledger import Ledger
from shoal.launch.environment import Place
from shoal.launch.lab.lab_file import MBIT_BYTES, Lab
from shoal.recipes.benchmarks.link_group import gathered, meet, while_counting
from shoal.recipes.benchmarks.machine import Result
from shoal.recipes.benchmarks.paired import check
from shoal.recipes.benchmarks.turns import interleaved, ratios

SECONDS, PAIRS = 1.5, 3
WITHIN, BYTES_WITHIN = 0.15, 0.03
PEERS = {"hierarchical": "gloo", "hierarchical table": "ring table"}


def measure(lab: Lab, place: Place, *, name: str, environ: Mapping[str, str]) -> Result | None:
    """A row for each side; checks of times and bytes against the closed forms."""
    meeting, hosts, ranks = meet(place, environ), len(lab.hosts), lab.ranks
    clock, ledger = meeting.group("clock", transport="gloo"), Ledger()
    gloo = meeting.group("gloo", transport="gloo", ledger=ledger)
    levels = meeting.group("levels", transport="hierarchical", ledger=ledger)
    tensor = torch.zeros(int(lab.rate_mbit(0, 1) * MBIT_BYTES * SECONDS / 4))
    tables = {"ring table": ring.all_reduce(ranks), "hierarchical table": two_level.hierarchical(ranks // hosts, hosts)}
    sides: dict[str, Callable[[], Any]] = {
        "gloo": lambda: gloo.all_reduce(tensor).wait(),
        "hierarchical": lambda: levels.all_reduce(tensor).wait(),
        "ring table": lambda: execute.all_reduce(tensor, tables["ring table"], gloo, tag=7),
        "hierarchical table": lambda: execute.all_reduce(tensor, tables["hierarchical table"], gloo, tag=7),
    }
    turns = interleaved(sides, clock, pairs=PAIRS, always=tuple(sides))
    counts = {}
    for side, step in sides.items():
        ledger.take()
        seen = while_counting(clock, step)
        said = sum(entry.between_bytes for entry in ledger.take().values())
        counts[side] = gathered(clock, [said, seen.bytes_sent])
    if place.rank != 0:
        return None
    forms = {side: closed_form(side, tensor.nbytes, ranks=ranks, hosts=hosts) for side in sides}
    rows = [_row(side, turns, counts[side], forms[side], lab, tensor.nbytes) for side in sides]
    return {"rows": rows, "checks": _checks(turns, rows, forms)}


def closed_form(side: str, size_bytes: int, *, ranks: int, hosts: int) -> float:
    """Bytes that leave one host."""
    n = hosts if side.startswith("hierarchical") else ranks
    return 2 * (n - 1) / n * size_bytes


def _row(
    side: str, turns: list[dict[str, float]], counts: list[list[float]], form: float, lab: Lab, size: int
) -> dict[str, Any]:
    first = lab.hosts[0]
    return {
        "part": "levels",
        "side": side,
        "bytes": size,
        "seconds": round(statistics.median(turn[side] for turn in turns), 4),
        "closed_form_bytes": int(form),
        "ledger_bytes": int(sum(counts[rank][0] for rank in first.ranks)),
        "interface_bytes": int(counts[first.ranks.start][1]),
    }


def _checks(
    turns: list[dict[str, float]], rows: list[dict[str, Any]], forms: Mapping[str, float]
) -> list[dict[str, Any]]:
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
