"""The cheapest algorithm for a collective of some size on given links, and the ranks' places in it.

Every table of the catalogue is walked (`shoal.cost.walk`) with the ranks as they are numbered, with hosts together, and
in the best order of a ring; where links differ, trees of up to `MOST_SEARCHED` ranks in an order of their own as well.
Ties go to the first. The choice follows from its arguments alone, so ranks that agree on the links agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.collectives.catalogue import tables
from shoal.collectives.table import Kind, Table, relabelled
from shoal.comm.algorithms.probe import tree_order
from shoal.cost.walk import walk_s
from shoal.topology.links import Links, best_order

MAX_BLOCKS = 64
"""Of a pipelined tree; more save less than 2 % of its time."""
MOST_SEARCHED = 16
"""Ranks of a tree whose order is searched for, which takes up to a third of a second."""
TREES = ("binomial", "double tree")
BLOCKS_SEARCHED = 4
"""Of a pipelined tree, which stand for all in the search: the steps of the others repeat theirs."""


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
    return min(ranking(kind, size, links, root=root, name=name), key=lambda choice: choice.seconds, default=None)


def ranking(
    kind: Kind, size: float, links: Links, *, root: int = 0, add_bytes_s: float = math.inf, name: str | None = None
) -> Iterator[Choice]:
    """Every candidate with its price; `name`: those of this name only."""
    every = tables(kind, links.ranks, local=links.local, blocks=_blocks(size, links))
    made = [table for table in every if name in (None, table.name)]
    orders = _orders(links, size, root if kind in ("broadcast", "reduce") else None)
    for order in orders:
        for table in made:
            yield _priced(table, order, size, links, add_bytes_s)
    if links.ranks <= MOST_SEARCHED and _differ(links):
        for table in (table for table in made if table.name in TREES):
            order = _searched(table, size, links, orders, add_bytes_s)
            yield _priced(table, order, size, links, add_bytes_s)


def _priced(table: Table, order: tuple[int, ...], size: float, links: Links, add_bytes_s: float) -> Choice:
    placed = relabelled(table, order)
    return Choice(placed, order, walk_s(placed, size, links, add_bytes_s=add_bytes_s))


def _searched(
    table: Table, size: float, links: Links, orders: Sequence[tuple[int, ...]], add_bytes_s: float
) -> tuple[int, ...]:
    """The order of a tree, found with few blocks, as long as those of `table`."""
    few = tables(table.kind, table.ranks, local=links.local, blocks=min(BLOCKS_SEARCHED, _blocks(size, links)))
    alike = next(other for other in few if other.name == table.name)
    return tree_order(alike, size * alike.chunks / table.chunks, links, begun=orders, add_bytes_s=add_bytes_s)


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
