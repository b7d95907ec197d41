"""Phases: steps of transfers that algorithms are put together from.

A reduce-scatter among `members` leaves the sum of `parts[i]` (some cells) with member i. Played backwards, with copies
for additions, it is an all-gather; a reduce played backwards is a broadcast. So each exists once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from shoal.collectives.table import Transfer

Phase = list[list[Transfer]]
Parts = Sequence[Sequence[int]]


def added(source: int, target: int, cells: Sequence[int]) -> list[Transfer]:
    """`cells` of `source` are added to the same cells of `target`."""
    return [Transfer(source, target, cell, cell, True) for cell in cells]


def copied(source: int, target: int, cells: Sequence[int]) -> list[Transfer]:
    """`cells` of `source` replace the same cells of `target`."""
    return [Transfer(source, target, cell, cell) for cell in cells]


def backwards(phase: Phase) -> Phase:
    """What was collected is handed out, along the same links in the other direction."""
    return [[Transfer(t.target, t.source, t.write, t.read) for t in step] for step in reversed(phase)]


def side_by_side(*phases: Phase) -> Phase:
    """Phases that run at the same time, step beside step."""
    return [[transfer for step in steps for transfer in step] for steps in zip_longest(*phases, fillvalue=[])]


def ring_reduce_scatter(members: Sequence[int], parts: Parts) -> Phase:
    """n - 1 steps; each part travels once around and ends with its owner."""
    n = len(members)
    return [
        [t for i in range(n) for t in added(members[i], members[(i + 1) % n], parts[(i - step - 1) % n])]
        for step in range(n - 1)
    ]


def ring_all_gather(members: Sequence[int], parts: Parts) -> Phase:
    """n - 1 steps in the direction of the reduce-scatter: a ring that runs backwards, played backwards."""
    return backwards(ring_reduce_scatter(members[::-1], parts[::-1]))


def halving(members: Sequence[int], parts: Parts) -> Phase:
    """Recursive halving among 2^k members: partners at distance n/2, n/4, ... 1 swap the half the other one keeps."""
    phase, distance = [], len(members) // 2
    while distance:
        phase.append([t for i in range(len(members)) for t in _half(members, parts, i, distance)])
        distance //= 2
    return phase


def _half(members: Sequence[int], parts: Parts, i: int, distance: int) -> list[Transfer]:
    partner = i ^ distance
    first = partner // distance * distance
    cells = [cell for part in parts[first : first + distance] for cell in part]
    return added(members[i], members[partner], cells)
