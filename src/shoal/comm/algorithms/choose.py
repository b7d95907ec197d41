"""The cheapest algorithm for a collective of some size on given links, and the ranks' places in it.

Every table of the catalogue is walked (`shoal.cost.walk`) with the ranks as they are numbered, with hosts together, and
in the best order of a ring. Ties go to the first. The choice follows from its arguments alone, so ranks that agree on
the links agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.collectives.catalogue import tables
from shoal.collectives.table import Kind, Table, relabelled
from shoal.cost.walk import walk_s
from shoal.topology.links import Links
from shoal.topology.ring_order import best_order

MAX_BLOCKS = 64
"""Of a pipelined tree; more save less than 2 % of its time."""


@dataclass(frozen=True)
class Choice:
    """`table` has the ranks in place already: `order[p]` stands where the algorithm says p."""

    table: Table
    order: tuple[int, ...]
    seconds: float


def choose(kind: Kind, size: float, links: Links, *, root: int = 0, add_bytes_s: float = math.inf) -> Choice:
    """For `size` bytes: the whole vector, or what one rank holds for an all-to-all."""
    return min(ranking(kind, size, links, root=root, add_bytes_s=add_bytes_s), key=lambda choice: choice.seconds)


def choose_named(name: str, kind: Kind, size: float, links: Links, *, root: int = 0) -> Choice | None:
    """The same among the algorithms of one name; None where this collective has none."""
    named = (choice for choice in ranking(kind, size, links, root=root) if choice.table.name == name)
    return min(named, key=lambda choice: choice.seconds, default=None)


def ranking(kind: Kind, size: float, links: Links, *, root: int = 0, add_bytes_s: float = math.inf) -> Iterator[Choice]:
    """Every candidate with its price."""
    made = tables(kind, links.ranks, local=links.local, blocks=_blocks(size, links))
    for order in _orders(links, size, root if kind in ("broadcast", "reduce") else None):
        for table in made:
            placed = relabelled(table, order)
            yield Choice(placed, order, walk_s(placed, size, links, add_bytes_s=add_bytes_s))


def _orders(links: Links, size: float, root: int | None) -> list[tuple[int, ...]]:
    """Without repetition; a root comes first."""
    numbered = tuple(range(links.ranks))
    by_host = tuple(sorted(numbered, key=lambda rank: (links.hosts[rank], rank)))
    orders = [numbered, by_host]
    if _differ(links):
        orders.append(best_order(links, size=size / links.ranks))
    return list(dict.fromkeys(_beginning(order, root) for order in orders))


def _differ(links: Links) -> bool:
    """Whether any two links do."""
    pairs = [(i, j) for i in range(links.ranks) for j in range(links.ranks) if i != j]
    return len({(links.latency_s[i][j], links.bytes_s[i][j]) for i, j in pairs}) > 1


def _beginning(order: tuple[int, ...], root: int | None) -> tuple[int, ...]:
    at = 0 if root is None else order.index(root)
    return order[at:] + order[:at]


def _blocks(size: float, links: Links) -> int:
    """Of each tree: the power of two nearest to sqrt(log2 n S / 2aw), where start-up and pipelining cost the same."""
    latency, rate = _mean(links, links.latency_s), _mean(links, links.bytes_s)
    if links.ranks == 1 or size == 0 or latency == 0:
        return 1
    best = math.sqrt(max(1.0, math.log2(links.ranks)) * size / (2 * latency * rate))
    return min(MAX_BLOCKS, 1 << max(0, round(math.log2(best))))


def _mean(links: Links, matrix: Sequence[Sequence[float]]) -> float:
    values = [matrix[i][j] for i in range(links.ranks) for j in range(links.ranks) if i != j]
    return sum(values) / max(1, len(values))
