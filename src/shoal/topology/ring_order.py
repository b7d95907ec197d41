"""The order of ranks around a ring: slow links are crossed as seldom as can be.

All links of a ring carry the same bytes at the same time, so the slowest sets the pace; a host's port is busy with all
links of the ring that leave the host. Among orders of the same pace the smallest sum of all links is taken. It is a
travelling salesman's tour: searched whole up to 8 ranks, above that improved by turning stretches around and moving
single ranks (2-opt and or-opt; Croes 1958, Or 1976) from the better of two beginnings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

from shoal.topology.links import Links

EXACT_RANKS = 8
"""7! = 5,040 orders of eight ranks take a tenth of a second."""
Order = tuple[int, ...]
Pace = tuple[float, float]


def best_order(links: Links, *, size: float = 1 << 20) -> Order:
    """The order for rings whose messages have `size` bytes; begins with rank 0."""
    ranks = range(links.ranks)
    if links.ranks <= EXACT_RANKS:
        return min(((0, *rest) for rest in permutations(ranks[1:])), key=lambda order: pace(links, order, size=size))
    begun = [_by_host(links), _nearest(links, size)]
    order = _improved(links, min(begun, key=lambda order: pace(links, order, size=size)), size)
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
