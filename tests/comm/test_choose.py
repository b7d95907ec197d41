"""The order of ranks in a tree, against the best of all orders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations

import pytest

from shoal.bench.link import labs
from shoal.bench.link_measurements import planted_links, shuffled, tree_to_best
from shoal.collectives.algorithms import tables
from shoal.collectives.table import CollectiveTable, Kind, relabelled
from shoal.comm.algorithms import choose as choosing
from shoal.comm.algorithms.choose import EFFORT, MOST_SEARCHED, OVERHEAD, TREES, RankedTable, choose, ranking, walk_s
from shoal.topology.links import Links

ORDER_WITHIN = 1.05
LATENCY_S = 2e-4
ROOTED = ("broadcast", "reduce")
TREE_KINDS: list[Kind] = ["broadcast", "reduce", "all_reduce"]


def square() -> Links:
    """Four hosts of one rank, and a slow link between the first and the third."""
    rates = [[1.25e7] * 4 for _ in range(4)]
    rates[0][2] = rates[2][0] = 2.5e6
    return Links(((LATENCY_S,) * 4,) * 4, tuple(map(tuple, rates)), (0, 1, 2, 3))


def topologies() -> dict[str, Links]:
    """Those of `shoal bench link` whose ranks share hosts, with a latency between these, and the square."""
    found = {"square": square()}
    for name, lab in labs("topology", []).items():
        if len(lab.hosts) == lab.ranks:
            continue
        links = planted_links(lab, shuffled(lab.ranks))
        latency = tuple(tuple(LATENCY_S * (a != b) for b in links.hosts) for a in links.hosts)
        found[name] = Links(latency, links.bytes_s, links.hosts)
    return found


def orders(links: Links, root: int | None) -> Iterator[tuple[int, ...]]:
    """All of them that differ: ranks of a host may take each other's places, but for the root."""
    seen = set()
    for order in permutations(range(links.ranks)):
        hosts = tuple(links.hosts[rank] for rank in order)
        if hosts not in seen and root in (None, order[0]):
            seen.add(hosts)
            yield order


def tree(kind: Kind, size: float, links: Links, root: int = 0) -> RankedTable:
    return min((c for c in ranking(kind, size, links, root=root) if c.table.name in TREES), key=lambda c: c.seconds)


def uneven(ranks: int) -> Links:
    """Every link is another."""
    draw = random.Random(ranks)
    latency, rate = (tuple(tuple(draw.uniform(*ends) for _ in range(ranks)) for _ in range(ranks))
                     for ends in ((1e-5, 1e-4), (1e7, 1e9)))  # fmt: skip
    return Links(latency, rate, tuple(range(ranks)))


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("name", topologies())
def test_a_tree_is_as_fast_as_in_the_best_order(name: str, kind: Kind) -> None:
    """Short and long vectors, from the first root and the last: within 5 % of the best of all orders."""
    links = topologies()[name]
    for size in (1 << 12, 1 << 18):
        for root in (0, links.ranks - 1) if kind in ROOTED else (0,):
            found = tree(kind, size, links, root)
            assert found.table.root == root or kind not in ROOTED
            (table,) = {c.table for c in ranking(kind, size, links) if c.table.name in TREES and c.order == tuple(
                range(links.ranks))}  # fmt: skip
            best = min(walk_s(relabelled(table, o), size, links)
                       for o in orders(links, root if kind in ROOTED else None))  # fmt: skip
            assert found.seconds <= ORDER_WITHIN * best, (size, root)


@pytest.mark.slow
def test_a_tree_finds_its_way_through_a_torus() -> None:
    """Of eight ranks, renumbered at random: within 5 % of the best of all orders, which is far from any."""
    lab = labs("topology", [])["torus-of-eight"]
    links = planted_links(lab, shuffled(lab.ranks))
    assert sum(rate > 1e7 for row in links.bytes_s for rate in row) == 8 + 2 * 12  # and the diagonal
    assert tree_to_best(links, links) <= ORDER_WITHIN
    (table,) = (t for t in tables("broadcast", 8) if t.name == "binomial")
    assert walk_s(table, 1 << 21, links) > 1.5 * choose("broadcast", 1 << 21, links).seconds


def test_a_tree_goes_around_a_slow_link() -> None:
    """No message of a broadcast crosses the slow link of the square, and it takes a third of the time."""
    links = square()
    found, *others = sorted((c for c in ranking("broadcast", 1 << 20, links)), key=lambda c: c.seconds)
    crossed = {(rank, send.to) for rank, row in enumerate(found.table.rows) for step in row for send in step.sends}
    assert not crossed & {(0, 2), (2, 0)}
    assert found.seconds < 0.4 * max(other.seconds for other in others)


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("kind", TREE_KINDS)
def test_the_search_is_bounded_and_the_same_everywhere(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 16 ranks whose links all differ; above that nothing is searched, nor for a name that is no tree's.

    The bound is on the messages that are walked, whatever a busy machine needs for each.
    """
    walked: list[int] = []

    def counted(table: CollectiveTable, size: float, links: Links, *, add_bytes_s: float) -> float:
        walked.append(OVERHEAD + sum(len(step.sends) for row in table.rows for step in row))
        return walk_s(table, size, links, add_bytes_s=add_bytes_s)

    links = uneven(MOST_SEARCHED)
    for size in (1 << 12, 1 << 26):
        walked.clear()
        with monkeypatch.context() as patched:
            patched.setattr(choosing, "walk_s", counted)
            first = choose(kind, size, links)
        assert 0 < sum(walked) < len(TREES) * EFFORT
        assert choose(kind, size, links) == first
    counts = [sum(choice.table.name in TREES for choice in ranking(kind, 1 << 20, uneven(MOST_SEARCHED + more)))
              for more in (0, 1)]  # fmt: skip
    assert counts[1] == counts[0] - 1
    assert {choice.table.name for choice in ranking(kind, 1 << 20, links, name="ring")} <= {"ring"}
