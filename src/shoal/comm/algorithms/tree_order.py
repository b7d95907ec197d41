"""The order of ranks in a tree: its edges cross slow links as seldom as can be.

A tree uses the links between some places only, and which of them decides the end does not change with most swaps of two
ranks. So orders are compared by their end, and then by the seconds of all messages. Swaps are taken while they help;
then the search begins again from the best order with some places shuffled (iterated local search: Lourenco, Martin and
Stutzle 2003). Where there are few orders, all are tried.

The search ends after so many messages, and draws from a fixed seed: ranks that agree on the links agree on the order.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, permutations

from shoal.collectives.table import Table
from shoal.cost.walk import walk_s
from shoal.topology.links import Links

EFFORT = 60_000
"""Messages that are walked, of some 5 us each. An order costs `OVERHEAD` more."""
OVERHEAD = 15
IDLE = 20
"""Shuffles in a row without a better order, after which none is expected."""
Order = tuple[int, ...]
Price = tuple[float, float]


def tree_order(
    table: Table, size: float, links: Links, *, begun: Sequence[Order], add_bytes_s: float = math.inf
) -> Order:
    """The order for `table`, a tree on a vector of `size` bytes; no worse than those in `begun`.

    Place 0 keeps its rank where the collective has a root.
    """
    search = _Search(table, size, links, add_bytes_s)
    fixed, movable = begun[0][: search.first], begun[0][search.first :]
    if math.factorial(len(movable)) * search.cost <= EFFORT:
        return min((*begun, *(fixed + rest for rest in permutations(movable))), key=search.price)
    best = min((search.climbed(order) for order in begun), key=search.price)
    draw, idle = random.Random(0), 0
    while idle < IDLE and search.left > 0:
        found = search.climbed(search.shuffled(best, draw))
        idle = 0 if search.price(found) < search.price(best) else idle + 1
        best = min(best, found, key=search.price)
    return best


class _Search:
    """`first` is the first place whose rank may change; each order has a `cost`, and this much effort is `left`."""

    def __init__(self, table: Table, size: float, links: Links, add_bytes_s: float) -> None:
        self._table, self._size, self._links, self._add_bytes_s = table, size, links, add_bytes_s
        self._edges: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, row in enumerate(table.rows):
            for send in (send for step in row for send in step.sends):
                self._edges[rank, send.to].append(len(send.cells))
        self.first = 0 if table.kind == "all_reduce" else 1
        self.cost = OVERHEAD + sum(map(len, self._edges.values()))
        self.left = EFFORT
        self._known: dict[Order, Price] = {}

    def price(self, order: Order) -> Price:
        """(seconds until the end, seconds of all messages)."""
        if order not in self._known:
            self.left -= self.cost
            placed, chunk = _placed(self._links, order), self._size / self._table.chunks
            whole = sum(
                len(cells) * placed.latency_s[a][b] + sum(cells) * chunk / placed.bytes_s[a][b]
                for (a, b), cells in self._edges.items()
            )
            end = walk_s(self._table, self._size, placed, add_bytes_s=self._add_bytes_s)
            self._known[order] = end, whole
        return self._known[order]

    def climbed(self, order: Order) -> Order:
        """Takes every swap of two places that helps, over and over, until none does."""
        before = None
        while before != order:
            before = order
            for one, other in combinations(range(self.first, len(order)), 2):
                if self.left <= 0:
                    return order
                order = min(order, _swapped(order, one, other), key=self.price)
        return order

    def shuffled(self, order: Order, draw: random.Random) -> Order:
        """Three swaps away."""
        for _ in range(3):
            one, other = draw.sample(range(self.first, len(order)), 2)
            order = _swapped(order, one, other)
        return order


def _swapped(order: Order, one: int, other: int) -> Order:
    changed = list(order)
    changed[one], changed[other] = order[other], order[one]
    return tuple(changed)


def _placed(links: Links, order: Order) -> Links:
    """The links between places."""
    latency, rate = (tuple(tuple(row[b] for b in order) for row in (matrix[a] for a in order))
                     for matrix in (links.latency_s, links.bytes_s))  # fmt: skip
    return Links(latency, rate, tuple(links.hosts[rank] for rank in order), links.gap_s)
