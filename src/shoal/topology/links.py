"""`Links`: what lies between every two ranks, measured or stated, and what it says about hosts and slow links.

Ranks of one host reach each other much faster than those of two. So rates, sorted, have a gap, and the ranks that are
joined by rates above it are the hosts; a gap is believed when every two ranks of such a host are above it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from shoal.errors import LayoutError

Matrix = tuple[tuple[float, ...], ...]
HOST_GAP = 3.0
"""The rates inside a host are at least this many times those between hosts."""
SLOW = 2.0
"""A link between hosts is slow when the best of them has more than this many times its rate."""


@dataclass(frozen=True)
class Links:
    """`latency_s[i][j]` and `bytes_s[i][j]` from rank i to rank j, each measured alone. The diagonals mean nothing.

    `hosts[i]` is the host of rank i. Ranks of a host share one port to the other hosts.
    `gap_s` is what each further message of a rank costs when it has several at once, whatever their length (LogGP's
    gap, Alexandrov et al. 1995).
    """

    latency_s: Matrix
    bytes_s: Matrix
    hosts: tuple[int, ...]
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.hosts)
        for name, matrix in (("latency_s", self.latency_s), ("bytes_s", self.bytes_s)):
            if len(matrix) != n or any(len(row) != n for row in matrix):
                raise LayoutError(f"{name} is not a matrix of {n} x {n}, one row and column a rank; complete it")
        if any(self.bytes_s[i][j] <= 0 for i in range(n) for j in range(n) if i != j):
            raise LayoutError("bytes_s has a rate of 0 or less between two ranks; every two ranks have to be connected")

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    @property
    def local(self) -> int:
        """Ranks on each host, or 1 where hosts differ in that."""
        counts = {self.hosts.count(host) for host in self.hosts}
        return counts.pop() if len(counts) == 1 else 1

    def seconds(self, source: int, target: int, size: float) -> float:
        """For one message of `size` bytes."""
        return self.latency_s[source][target] + size / self.bytes_s[source][target]


def uniform(ranks: int, *, latency_s: float, bytes_s: float) -> Links:
    """Every rank a host of its own, all links alike."""
    return Links(_full(ranks, latency_s), _full(ranks, bytes_s), tuple(range(ranks)))


def clustered(hosts: Sequence[int], *, inner: tuple[float, float], outer: tuple[float, float]) -> Links:
    """`inner` and `outer` are (latency_s, bytes_s) inside a host and between hosts."""

    def matrix(which: int) -> Matrix:
        return tuple(tuple((inner if a == b else outer)[which] for b in hosts) for a in hosts)

    return Links(matrix(0), matrix(1), tuple(hosts))


def measured(latency_s: Matrix, bytes_s: Matrix, *, gap_s: float = 0.0) -> Links:
    """Links whose hosts are read from the rates."""
    return Links(latency_s, bytes_s, hosts(bytes_s), gap_s)


def hosts(bytes_s: Matrix) -> tuple[int, ...]:
    """The host of each rank, numbered by first appearance. Without a gap in the rates, all ranks are on one."""
    rates = sorted({_rate(bytes_s, i, j) for i in range(len(bytes_s)) for j in range(i)}, reverse=True)
    for above, below in pairwise(rates):
        if above >= HOST_GAP * below:
            found = _joined(bytes_s, above)
            if _complete(bytes_s, found, above):
                return found
    return (0,) * len(bytes_s)


def slow_links(links: Links) -> list[tuple[int, int]]:
    """Pairs of hosts whose link has less than 1/`SLOW` of the rate of the best link between hosts."""
    best: dict[tuple[int, int], float] = {}
    for i, host in enumerate(links.hosts):
        for j, other in enumerate(links.hosts):
            if host < other:
                best[host, other] = max(best.get((host, other), 0.0), _rate(links.bytes_s, i, j))
    return sorted(pair for pair, rate in best.items() if rate * SLOW < max(best.values()))


def _full(ranks: int, value: float) -> Matrix:
    return ((value,) * ranks,) * ranks


def _rate(bytes_s: Matrix, i: int, j: int) -> float:
    """Of the slower direction."""
    return min(bytes_s[i][j], bytes_s[j][i])


def _joined(bytes_s: Matrix, least: float) -> tuple[int, ...]:
    """Components of the graph of links of at least this rate."""
    found = [-1] * len(bytes_s)
    count = 0
    for start in range(len(bytes_s)):
        if found[start] >= 0:
            continue
        open_ = [start]
        while open_:
            rank = open_.pop()
            found[rank] = count
            open_ += [o for o in range(len(bytes_s)) if found[o] < 0 and _rate(bytes_s, rank, o) >= least]
        count += 1
    return tuple(found)


def _complete(bytes_s: Matrix, found: Sequence[int], least: float) -> bool:
    """Whether every two ranks of a component are joined directly."""
    n = len(found)
    return all(_rate(bytes_s, i, j) >= least for i in range(n) for j in range(i) if found[i] == found[j])


# The order of ranks around a ring: slow links are crossed as seldom as can be.
#
# All links of a ring carry the same bytes at the same time, so the slowest sets the pace; a host's port is busy with
# all links of the ring that leave the host. Among orders of the same pace the smallest sum of all links is taken. It is
# a travelling salesman's tour: searched whole up to 8 ranks, above that improved by turning stretches around and moving
# single ranks (2-opt and or-opt; Croes 1958, Or 1976) from the better of two beginnings, and again from changed orders.


EXACT_RANKS = 8
"""7! = 5,040 orders of eight ranks take a tenth of a second."""
KICKS = 4000
"""Divided by the square of the ranks: how often the search starts again from a changed order. None from 64 ranks on."""
Order = tuple[int, ...]
Pace = tuple[float, float]


def best_order(links: Links, *, size: float = 1 << 20, alike: float = 1.0) -> Order:
    """The order for rings whose messages have `size` bytes; begins with rank 0.

    Where it is searched whole, orders whose slowest links differ by less than the factor `alike` are of one pace: noise
    of a measurement tells them apart, and the sum of all links says more.
    """
    ranks = range(links.ranks)
    if links.ranks <= EXACT_RANKS:
        paces = {(0, *rest): pace(links, (0, *rest), size=size) for rest in permutations(ranks[1:])}
        slowest_s = alike * min(slowest_s for slowest_s, _ in paces.values())
        return min((order for order in paces if paces[order][0] <= slowest_s), key=lambda order: paces[order][::-1])
    begun = [_by_host(links), _nearest(links, size)]
    order = _improved(links, min(begun, key=lambda order: pace(links, order, size=size)), size)
    draw = random.Random(0)
    for _ in range(KICKS // links.ranks**2):
        changed = _improved(links, _kicked(order, draw), size)
        order = min(order, changed, key=lambda order: pace(links, order, size=size))
    return order[order.index(0) :] + order[: order.index(0)]


def pace(links: Links, order: Sequence[int], *, size: float) -> Pace:
    """(seconds of the slowest link, seconds of all links) of one step around the ring."""
    hosts, leaving, entering = links.hosts, defaultdict[int, float](float), defaultdict[int, float](float)
    pairs = list(zip(order, (*order[1:], order[0]), strict=True))
    own = [size / links.bytes_s[a][b] for a, b in pairs]
    for (a, b), seconds in zip(pairs, own, strict=True):
        if hosts[a] != hosts[b]:
            leaving[hosts[a]] += seconds
            entering[hosts[b]] += seconds
    taken = []
    for (a, b), seconds in zip(pairs, own, strict=True):
        port = max(leaving[hosts[a]], entering[hosts[b]]) if hosts[a] != hosts[b] else seconds
        taken.append(links.latency_s[a][b] + port)
    return max(taken), sum(taken)


def _by_host(links: Links) -> Order:
    return tuple(sorted(range(links.ranks), key=lambda rank: (links.hosts[rank], rank)))


def _nearest(links: Links, size: float) -> Order:
    """Always on to the nearest rank that is left."""
    order, left = [0], set(range(1, links.ranks))
    while left:
        order.append(min(left, key=lambda rank: (links.seconds(order[-1], rank, size), rank)))
        left.remove(order[-1])
    return tuple(order)


def _improved(links: Links, order: Order, size: float) -> Order:
    """Takes every change that helps, over and over, until none does."""
    best, before = pace(links, order, size=size), None
    while before != best:
        before = best
        for change, first, last in _changes(len(order)):
            changed = change(order, first, last)
            if (now := pace(links, changed, size=size)) < best:
                order, best = changed, now
    return order


def _kicked(order: Order, draw: random.Random) -> Order:
    """Two neighbouring stretches change places (the double bridge of Martin, Otto and Felten, 1991): no few turns and
    moves undo it."""
    first, second, third = sorted(draw.sample(range(1, len(order)), 3))
    return order[:first] + order[second:third] + order[first:second] + order[third:]


def _changes(ranks: int) -> Iterator[tuple[Callable[[Order, int, int], Order], int, int]]:
    for first in range(ranks):
        for last in range(ranks):
            if first + 1 < last:
                yield _turned, first, last
            if first != last:
                yield _moved, first, last


def _turned(order: Order, first: int, last: int) -> Order:
    """The stretch from place `first` to `last` the other way around."""
    return order[:first] + order[first : last + 1][::-1] + order[last + 1 :]


def _moved(order: Order, taken: int, place: int) -> Order:
    """One rank at another place."""
    rest = order[:taken] + order[taken + 1 :]
    return (*rest[:place], order[taken], *rest[place:])
