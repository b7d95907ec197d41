"""Measures the links between all ranks of a group: a latency and a rate for each direction of each pair, and the gap.

One pair at a time, while the others wait at a barrier, so that nobody shares a link. A tiny message there and back
takes twice the latency; a larger one there and a tiny one back gives the rate, several tiny ones there and one back
what each further message costs. Where the larger one hardly takes longer than the tiny one, which inside a host is so,
a larger still is sent: a rate is a difference of two times, and must not be one of their noise. Medians, the same on
all ranks.

The order of ranks in a tree: its edges cross slow links as seldom as can be.

A tree uses the links between some places only, and which of them decides the end does not change with most swaps of two
ranks. So orders are compared by their end, and then by the seconds of all messages. Swaps are taken while they help;
then the search begins again from the best order with some places shuffled (iterated local search: Lourenco, Martin and
Stutzle 2003). Where there are few orders, all are tried.

The search ends after so many messages, and draws from a fixed seed: ranks that agree on the links agree on the order.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, permutations

import torch

from shoal.collectives.table import Table
from shoal.comm.collective import Collective
from shoal.cost.walk import walk_s
from shoal.topology.links import Links, Matrix, measured

LEAST_SHARE = 0.1
"""Of a timing that counts as transfer when noise makes the latency look like all of it."""
MANY = 8
"""Tiny messages at once, to see what each costs beside the latency."""
DOMINATES = 4.0
"""A transfer is measured well when it takes this many times as long as a tiny message."""
GROWTH, MOST_BYTES = 8, 1 << 24
_TAG, _TOLD = 900_001, 900_002


def probe(group: Collective, *, device: torch.device, size_bytes: int = 1 << 18, repeats: int = 5) -> Links:
    """The links of `group`, its hosts read from them. Every rank has to call it; n (n-1) measurements.

    `size_bytes`, the first size of the larger message, has to exceed what the network lets through in a burst.
    """
    own = torch.ones(group.size, 3, dtype=torch.float64, device=device)
    for source, target in permutations(range(group.size), 2):
        if group.rank == source:
            own[target] = torch.tensor(_time(group, target, device, size_bytes, repeats), dtype=torch.float64)
        elif group.rank == target:
            _answer(group, source, device, repeats)
        group.barrier().wait()
    everyone = torch.empty(group.size * group.size, 3, dtype=torch.float64, device=device)
    group.all_gather(everyone, own).wait()
    latency, rate, gap = everyone.view(group.size, group.size, 3).cpu().unbind(-1)
    apart = ~torch.eye(group.size, dtype=torch.bool)
    return measured(_matrix(latency), _matrix(rate), gap_s=float(gap[apart].median()) if group.size > 1 else 0.0)


def _matrix(tensor: torch.Tensor) -> Matrix:
    return tuple(tuple(row) for row in tensor.tolist())


def _time(
    group: Collective, target: int, device: torch.device, size_bytes: int, repeats: int
) -> tuple[float, float, float]:
    """(latency_s, bytes_s, gap_s) towards `target`."""
    tiny_s = _median_s(group, target, device, 1, 1, repeats)
    many_s = _median_s(group, target, device, 1, MANY, repeats)
    large_s = _median_s(group, target, device, size_bytes, 1, repeats)
    while large_s < DOMINATES * tiny_s and size_bytes * GROWTH <= MOST_BYTES:
        size_bytes *= GROWTH
        large_s = _median_s(group, target, device, size_bytes, 1, repeats)
    _tell(group, target, device, 0, 0)
    rate = size_bytes / max(large_s - tiny_s, LEAST_SHARE * large_s)
    return tiny_s / 2, rate, max(0.0, many_s - tiny_s) / (MANY - 1)


def _median_s(group: Collective, target: int, device: torch.device, size: int, count: int, repeats: int) -> float:
    """Seconds for `count` messages of `size` bytes there and a tiny one back."""
    _tell(group, target, device, size, count)
    message, reply, times = _bytes(size, device), _bytes(1, device), []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        sent = [group.send(message, to=target, tag=_TAG) for _ in range(count)]
        group.recv(reply, source=target, tag=_TAG).wait()
        for handle in sent:
            handle.wait()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])  # the first opens connections and touches memory


def _tell(group: Collective, target: int, device: torch.device, size: int, count: int) -> None:
    """What comes next: a size and how many of it; none at the end."""
    group.send(torch.tensor([size, count], device=device), to=target, tag=_TOLD).wait()


def _answer(group: Collective, source: int, device: torch.device, repeats: int) -> None:
    """The other side of `_median_s`, until `source` tells the end."""
    told = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        group.recv(told, source=source, tag=_TOLD).wait()
        size, count = (int(number) for number in told)
        if count == 0:
            return
        messages, reply = [_bytes(size, device) for _ in range(count)], _bytes(1, device)
        for _ in range(repeats + 1):
            for handle in [group.recv(message, source=source, tag=_TAG) for message in messages]:
                handle.wait()
            group.send(reply, to=source, tag=_TAG).wait()


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


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
