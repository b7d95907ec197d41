"""Hosts, slow links and orders are read from planted matrices."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from shoal.collectives import algorithms
from shoal.collectives.table import relabelled
from shoal.comm.algorithms.choose import walk_s
from shoal.errors import LayoutError
from shoal.topology.links import (
    EXACT_RANKS,
    Links,
    Matrix,
    best_order,
    clustered,
    hosts,
    measured,
    pace,
    slow_links,
    uniform,
)

NOISE = 0.3
"""Two measurements of one link differ by this much on a busy machine."""
ORDER_SLACK = 1.05
"""The chosen order is within 5 % of the best of all."""
HEURISTIC_SLACK = 1.2
ROUNDING = 1e-9
INSIDE, BETWEEN, SLOW = 5e9, 1e8, 1e7
SIZE = 1 << 22


def planted(placement: list[int], slow: set[tuple[int, int]], seed: int) -> tuple[Matrix, Matrix]:
    """(latency_s, bytes_s) of ranks on these hosts, with slow links between some hosts, each measured with noise."""
    draw = random.Random(seed)

    def rate(i: int, j: int) -> float:
        a, b = sorted((placement[i], placement[j]))
        base = INSIDE if a == b else SLOW if (a, b) in slow else BETWEEN
        return base * draw.uniform(1 - NOISE, 1 + NOISE)

    n = range(len(placement))
    return tuple(tuple(1e-5 for _ in n) for _ in n), tuple(tuple(rate(i, j) for j in n) for i in n)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("placement", "slow"),
    [
        ([0, 0, 1, 1], []),
        ([0, 1, 0, 1, 0, 1], []),
        ([0, 1, 2, 2, 1, 0, 3, 3], [(1, 2)]),
        ([0, 0, 0, 1, 2], [(0, 1), (1, 2)]),
        ([0, 1, 2, 3], []),
    ],
)  # fmt: skip
def test_planted_hosts_and_slow_links_are_found(placement: list[int], slow: list[tuple[int, int]], seed: int) -> None:
    """With noise of 30 % on every rate, wherever a host has two ranks."""
    found = measured(*planted(placement, set(slow), seed))
    if len(set(placement)) < len(placement):
        assert found.hosts == tuple(placement)
        assert slow_links(found) == slow
    else:  # links that are all alike say nothing about hosts
        assert found.hosts == (0,) * len(placement)


def test_a_gap_that_does_not_part_hosts_is_passed_over() -> None:
    """A link of a host that a busy machine made look five times slower leaves the host whole."""
    placement = [0, 0, 0, 1, 1, 1]
    rates = [list(row) for row in clustered(placement, inner=(0, INSIDE), outer=(0, BETWEEN)).bytes_s]
    rates[0][1] = INSIDE / 5
    assert hosts(tuple(map(tuple, rates))) == tuple(placement)


def test_ranks_that_are_near_only_through_another_are_no_host() -> None:
    """0 is near 1 and 1 is near 2, but 0 is far from 2: hosts cannot be read from that."""
    rates = [[BETWEEN] * 4 for _ in range(4)]
    for i, j in ((0, 1), (1, 2)):
        rates[i][j] = rates[j][i] = INSIDE
    assert hosts(tuple(map(tuple, rates))) == (0, 0, 0, 0)


def test_a_matrix_that_is_not_whole_is_refused() -> None:
    """Rates of all pairs are needed."""
    with pytest.raises(LayoutError, match="matrix of 2 x 2"):
        Links(((0.0,),), ((1.0, 1.0), (1.0, 1.0)), (0, 1))
    with pytest.raises(LayoutError, match="rate of 0 or less"):
        Links(((0.0,) * 2,) * 2, ((1.0, 0.0), (1.0, 1.0)), (0, 1))


@pytest.mark.parametrize(
    ("placement", "slow", "seed"),
    [([0, 1, 0, 1, 0, 1], [], seed) for seed in range(5)]
    + [([0, 1, 2, 2, 1, 0], [(1, 2)], seed) for seed in range(5)]
    + [([0, 1, 2, 2, 1, 0, 3], [(1, 2), (0, 3)], 1), ([0, 1, 2, 3, 0, 1, 2, 3], [(0, 1), (2, 3)], 1)],
)  # fmt: skip
def test_the_order_is_within_a_twentieth_of_the_best_of_all(
    placement: list[int], slow: list[tuple[int, int]], seed: int
) -> None:
    """By the time of half a ring all-reduce, walked in each of the (n-1)! orders."""
    links = measured(*planted(placement, set(slow), seed))
    table = algorithms.reduce_scatter_by_ring(links.ranks)
    orders = ((0, *rest) for rest in permutations(range(1, links.ranks)))
    times = {order: walk_s(table, SIZE, permuted(links, order)) for order in orders}
    assert links.ranks <= EXACT_RANKS
    assert times[best_order(links, size=SIZE / links.ranks)] <= ORDER_SLACK * min(times.values())
    assert max(times.values()) > 1.5 * min(times.values())  # an order picked blindly would be seen


def permuted(links: Links, order: tuple[int, ...]) -> Links:
    """Rank p of the result is rank `order[p]`."""

    def matrix(old: Matrix) -> Matrix:
        return tuple(tuple(old[i][j] for j in order) for i in order)

    return Links(matrix(links.latency_s), matrix(links.bytes_s), tuple(links.hosts[rank] for rank in order))


def test_placing_ranks_is_placing_links() -> None:
    """A table with its ranks in an order takes as long as the table on links in that order."""
    links = measured(*planted([0, 1, 2, 0, 1], {(0, 2)}, seed=4))
    table, order = algorithms.all_reduce_by_ring(5), (0, 3, 1, 4, 2)
    assert walk_s(relabelled(table, order), SIZE, links) == walk_s(table, SIZE, permuted(links, order))


def test_a_slow_link_is_crossed_only_where_it_must_be() -> None:
    """Four hosts, two slow links between them: a tour that visits each host once passes neither."""
    placement = [0, 1, 2, 3, 0, 1, 2, 3]
    links = measured(*planted(placement, {(0, 1), (2, 3)}, seed=3))
    order = best_order(links)
    crossed = [tuple(sorted((placement[a], placement[b]))) for a, b in zip(order, order[1:] + order[:1], strict=True)]
    assert not {(0, 1), (2, 3)} & set(crossed)
    assert sum(a != b for a, b in crossed) == 4


@pytest.mark.parametrize(("count", "local"), [(6, 2), (4, 4), (8, 3)])
def test_many_ranks_come_near_the_order_that_was_planted(count: int, local: int) -> None:
    """Hosts along a chain of good links, shuffled: hardly slower than the order that was planted."""
    draw = random.Random(count)
    placement = [host for host in range(count) for _ in range(local)]
    draw.shuffle(placement)
    chain = draw.sample(range(count), count)
    near = {tuple(sorted((chain[i - 1], chain[i]))) for i in range(count)}
    slow = {(a, b) for a in range(count) for b in range(a + 1, count)} - near
    links = measured(*planted(placement, slow, seed=count))
    order = best_order(links)
    good = sorted(range(len(placement)), key=lambda rank: chain.index(placement[rank]))
    size = float(1 << 20)
    assert order[0] == 0
    assert sorted(order) == list(range(len(placement)))
    assert pace(links, order, size=size)[0] <= HEURISTIC_SLACK * pace(links, good, size=size)[0]


def test_the_slowest_link_counts_before_the_sum() -> None:
    """Over 0-2-1-3 all links take 4 s at most; the tour with the smallest sum has one of 5 s."""
    seconds = {(0, 1): 1.0, (2, 3): 5.0, (0, 2): 1.0, (1, 3): 1.0, (0, 3): 4.0, (1, 2): 4.0}
    rates = tuple(tuple(1 / seconds.get((min(i, j), max(i, j)), 1.0) for j in range(4)) for i in range(4))
    links = Links(((0.0,) * 4,) * 4, rates, (0,) * 4)
    assert best_order(links, size=1) in {(0, 2, 1, 3), (0, 3, 1, 2)}


@pytest.mark.parametrize("seed", range(8))
def test_no_stretch_of_a_long_ring_is_better_the_other_way_around(seed: int) -> None:
    """12 ranks, more than are searched whole; links drawn at random, alike in both directions."""
    draw = random.Random(seed)
    drawn = [[draw.uniform(1e6, 1e9) for _ in range(12)] for _ in range(12)]
    rates = tuple(tuple(drawn[min(i, j)][max(i, j)] for j in range(12)) for i in range(12))
    links = Links(((0.0,) * 12,) * 12, rates, (0,) * 12)
    order = best_order(links)
    slowest, total = pace(links, order, size=float(1 << 20))
    for first in range(12):
        for last in range(first + 2, 13):
            turned = order[:first] + order[first:last][::-1] + order[last:]
            assert (slowest, total * (1 - ROUNDING)) <= pace(links, turned, size=float(1 << 20))


def test_links_that_are_all_alike_keep_their_order() -> None:
    """Nothing to gain, nothing moved."""
    assert best_order(uniform(5, latency_s=1e-6, bytes_s=1e9)) == (0, 1, 2, 3, 4)
