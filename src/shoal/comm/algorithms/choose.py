"""The cheapest algorithm for a collective of some size on given links, and the order of the ranks in it.

Every table of the catalogue is priced with the ranks as they are numbered, with hosts together, and
in the best order of a ring; where links differ, trees of up to `MOST_SEARCHED` ranks also in an order of their own.
Ties go to the first. The choice follows from its arguments alone, so ranks that agree on the links agree on it.

Note: the order of ranks in a tree
----------------------------------
A tree uses the links between some places only, and most swaps of two ranks do not change the time at which it ends. So
orders are compared by that time, and then by the seconds of all messages. The search swaps two ranks while that helps,
then begins again from the best order with some places shuffled (iterated local search: Lourenco, Martin and Stutzle
2003). Where there are few orders, all are tried. The search ends after a number of messages, and draws from a fixed
seed: ranks that agree on the links agree on the order.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import NamedTuple

from shoal.collectives.algorithms import tables
from shoal.collectives.table import CollectiveTable, Kind, Step, relabelled
from shoal.topology.links import Links, best_order

# Seconds and bytes of a table of `shoal.collectives` on given links, by walking it: alpha-beta-gamma.
#
# A message begins when both ranks have come to its step, and takes the link's latency and as long as its busiest port:
# a rank has one port for each direction, and the ranks of a host share one to the other hosts. A port that k messages
# pass in one step is busy for the sum of their S/w and for k - 1 gaps g:
#
#     end = max(clock of source, clock of target) + a + max over the ports it passes of (sum of S/w + (k - 1) g)
#
# Then what was received is added at `add_bytes_s`. On uniform links without gaps this gives the closed forms of
# `alpha_beta`.


class _Message(NamedTuple):
    source: int
    target: int
    cells: int


def walk_s(table: CollectiveTable, size: float, links: Links, *, add_bytes_s: float = math.inf) -> float:
    """Seconds until the last rank is done; `size` is the whole vector, or what one rank holds for an all-to-all."""
    chunk = size / table.chunks
    clocks = [0.0] * table.ranks
    for step in range(table.steps):
        clocks = _after(clocks, list(_messages(table, step)), chunk, links)
        for rank, row in enumerate(table.rows):
            clocks[rank] += _added(row[step]) * chunk / add_bytes_s
    return max(clocks)


def bytes_between(table: CollectiveTable, size: float, hosts: Sequence[int]) -> float:
    """Bytes that leave a host for another, of all ranks together."""
    crossing = (
        message.cells
        for step in range(table.steps)
        for message in _messages(table, step)
        if hosts[message.source] != hosts[message.target]
    )
    return sum(crossing) * size / table.chunks


def _after(clocks: list[float], messages: Sequence[_Message], chunk: float, links: Links) -> list[float]:
    """The clocks when the messages of one step are through."""
    busy: dict[tuple[str, int], float] = defaultdict(lambda: -links.gap_s)
    for message in messages:
        seconds = links.gap_s + message.cells * chunk / links.bytes_s[message.source][message.target]
        for port in _ports(message, links.hosts):
            busy[port] += seconds
    ends = clocks[:]
    for message in messages:
        source, target, _ = message
        wire = links.latency_s[source][target] + max(busy[port] for port in _ports(message, links.hosts))
        end = max(clocks[source], clocks[target]) + wire
        ends[source], ends[target] = max(ends[source], end), max(ends[target], end)
    return ends


def _ports(message: _Message, hosts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """What a message passes."""
    yield "from rank", message.source
    yield "to rank", message.target
    if hosts[message.source] != hosts[message.target]:
        yield "from host", hosts[message.source]
        yield "to host", hosts[message.target]


def _messages(table: CollectiveTable, step: int) -> Iterator[_Message]:
    for rank, row in enumerate(table.rows):
        for send in row[step].sends:
            yield _Message(rank, send.to, len(send.cells))


def _added(step: Step) -> int:
    """Cells that a rank adds."""
    return sum(len(r.cells) for r in step.receives if r.reduce) + sum(move.reduce for move in step.moves)


MAX_BLOCKS = 64
"""Of a pipelined tree; more save less than 2 % of its time."""
MOST_SEARCHED = 16
"""Ranks of a tree whose order is searched for, which takes up to a third of a second."""
TREES = ("binomial", "double tree")
BLOCKS_SEARCHED = 4
"""Of a pipelined tree, which stand for all in the search: the steps of the others repeat theirs."""

EFFORT = 60_000
"""Messages that are walked, of some 5 us each. An order costs `OVERHEAD` more."""
OVERHEAD = 15
IDLE = 20
"""Shuffles in a row without a better order, after which none is expected."""
Order = tuple[int, ...]
Price = tuple[float, float]


@dataclass(frozen=True)
class RankedTable:
    """`table` has the ranks in place already: `order[p]` stands where the algorithm says p."""

    table: CollectiveTable
    order: tuple[int, ...]
    seconds: float


def choose(kind: Kind, size: float, links: Links, *, root: int = 0, add_bytes_s: float = math.inf) -> RankedTable:
    """For `size` bytes: the whole vector, or what one rank holds for an all-to-all."""
    return min(ranking(kind, size, links, root=root, add_bytes_s=add_bytes_s), key=lambda choice: choice.seconds)


def choose_named(name: str, kind: Kind, size: float, links: Links, *, root: int = 0) -> RankedTable | None:
    """The same among the algorithms of one name; None where this collective has none."""
    return min(ranking(kind, size, links, root=root, name=name), key=lambda choice: choice.seconds, default=None)


def ranking(
    kind: Kind, size: float, links: Links, *, root: int = 0, add_bytes_s: float = math.inf, name: str | None = None
) -> Iterator[RankedTable]:
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


def _priced(
    table: CollectiveTable, order: tuple[int, ...], size: float, links: Links, add_bytes_s: float
) -> RankedTable:
    placed = relabelled(table, order)
    return RankedTable(placed, order, walk_s(placed, size, links, add_bytes_s=add_bytes_s))


def _searched(
    table: CollectiveTable, size: float, links: Links, orders: Sequence[tuple[int, ...]], add_bytes_s: float
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


def tree_order(
    table: CollectiveTable, size: float, links: Links, *, begun: Sequence[Order], add_bytes_s: float = math.inf
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

    def __init__(self, table: CollectiveTable, size: float, links: Links, add_bytes_s: float) -> None:
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
