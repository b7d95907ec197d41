"""Walking a table gives the closed forms where those are exact, and the bytes between hosts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from shoal.collectives import algorithms
from shoal.collectives.table import CollectiveTable, Transfer, table_of
from shoal.comm.algorithms.choose import bytes_between, walk_s
from shoal.cost import alpha_beta
from shoal.topology.links import clustered, uniform

LATENCY_S, BYTES_S, SIZE = 2e-5, 1e9, 3e6
ROUNDING = 1e-9
TREE_SLACK = 1.15
"""A pipelined tree of 64 blocks fills and drains: up to 2 log2 n of 2 x 128 steps."""
ANY, POWERS = (1, 2, 3, 5, 8, 12, 16, 31, 64), (1, 2, 4, 8, 16, 32, 64)


# Closed forms: n ranks, S bytes, latency a, rate w (Thakur, Rabenseifner and Gropp 2005; Bruck et al. 1997).


def _recursive_doubling(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """log2 n (a + S/w)."""
    return math.log2(ranks) * (latency_s + size / bytes_s)


def _halving_doubling(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """2 log2 n a + 2 (n-1)/n S/w."""
    return 2 * math.ceil(math.log2(ranks)) * latency_s + 2 * (ranks - 1) / ranks * size / bytes_s


def _bruck_all_to_all(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """log2 n (a + S/2w)."""
    return math.log2(ranks) * (latency_s + size / (2 * bytes_s))


def _one_shot(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """a + (n-1) S/w: every rank reads all others' vectors."""
    return (latency_s + (ranks - 1) * size / bytes_s) if ranks > 1 else 0.0


def _two_shot(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """2a + 2 (n-1)/n S/w: every rank sums its share, then reads the other shares."""
    return (2 * latency_s + 2 * (ranks - 1) / ranks * size / bytes_s) if ranks > 1 else 0.0


def _torus_all_reduce(rows: int, columns: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """Rings along one dimension, then rings along the other with what is left of the vector."""
    first = alpha_beta.ring_all_reduce(columns, size, latency_s=latency_s, bytes_s=bytes_s)
    return first + alpha_beta.ring_all_reduce(rows, size / columns, latency_s=latency_s, bytes_s=bytes_s)


def _hierarchical_all_reduce(
    local: int, nodes: int, size: float, *, inner: tuple[float, float], outer: tuple[float, float]
) -> float:
    """A reduce-scatter inside, an all-reduce of S/g between, an all-gather inside; links are (latency_s, bytes_s)."""
    inside = alpha_beta.ring_all_reduce(local, size, latency_s=inner[0], bytes_s=inner[1])
    return inside + alpha_beta.ring_all_reduce(nodes, size / local, latency_s=outer[0], bytes_s=outer[1])


@pytest.mark.parametrize(
    ("generator", "form", "sizes"),
    [
        (algorithms.all_reduce_by_ring, alpha_beta.ring_all_reduce, ANY),
        (algorithms.all_gather_by_ring, alpha_beta.ring_all_gather, ANY),
        (algorithms.reduce_scatter_by_ring, alpha_beta.ring_all_gather, ANY),
        (algorithms.all_reduce_by_circulant, _halving_doubling, ANY),
        (algorithms.halving_doubling, _halving_doubling, POWERS),
        (algorithms.recursive_doubling, _recursive_doubling, POWERS),
        (algorithms.one_shot, _one_shot, ANY),
        (algorithms.two_shot, _two_shot, ANY),
        (algorithms.all_to_all_by_direct, alpha_beta.pairwise_all_to_all, ANY),
        (algorithms.all_to_all_by_bruck, _bruck_all_to_all, POWERS),
    ],
)  # fmt: skip
def test_a_walk_on_uniform_links_is_the_closed_form(
    generator: Callable[[int], CollectiveTable], form: Callable[..., float], sizes: tuple[int, ...]
) -> None:
    """For every number of ranks for which the form is exact."""
    for ranks in sizes:
        walked = walk_s(generator(ranks), SIZE, uniform(ranks, latency_s=LATENCY_S, bytes_s=BYTES_S))
        assert walked == pytest.approx(form(ranks, SIZE, latency_s=LATENCY_S, bytes_s=BYTES_S), rel=ROUNDING), ranks


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 4), (3, 5), (8, 8)])
def test_a_torus_and_a_hierarchy_are_their_closed_forms(rows: int, columns: int) -> None:
    """On uniform links; and between hosts, whose port g ranks share, each of them has a g-th of its rate."""
    links = uniform(rows * columns, latency_s=LATENCY_S, bytes_s=BYTES_S)
    torus = _torus_all_reduce(rows, columns, SIZE, latency_s=LATENCY_S, bytes_s=BYTES_S)
    assert walk_s(algorithms.torus(rows, columns), SIZE, links) == pytest.approx(torus, rel=ROUNDING)
    inner, outer = (1e-6, 1e10), (LATENCY_S, BYTES_S)
    hosts = [rank // columns for rank in range(rows * columns)]
    form = _hierarchical_all_reduce(columns, rows, SIZE, inner=inner, outer=(LATENCY_S, BYTES_S / columns))
    walked = walk_s(algorithms.hierarchical(columns, rows), SIZE, clustered(hosts, inner=inner, outer=outer))
    assert walked == pytest.approx(form, rel=ROUNDING)


@pytest.mark.parametrize("ranks", [2, 3, 8, 13, 32])
def test_a_pipelined_double_tree_nears_its_closed_form(ranks: int) -> None:
    """From above, for a long vector in many blocks."""
    links = uniform(ranks, latency_s=0, bytes_s=BYTES_S)
    walked = walk_s(algorithms.all_reduce_by_double_tree(ranks, blocks=64), SIZE, links)
    form = alpha_beta.double_binary_tree(ranks, SIZE, latency_s=0, bytes_s=BYTES_S)
    assert 0.5 * form <= walked <= TREE_SLACK * form


def test_a_rank_with_many_messages_at_once_pays_for_each() -> None:
    """n - 2 gaps in each of two steps of a direct all-reduce, none in a ring, which has one message a step."""
    gap_s = 1e-6
    links = uniform(8, latency_s=LATENCY_S, bytes_s=BYTES_S)
    slower = replace(links, gap_s=gap_s)
    assert walk_s(algorithms.all_reduce_by_ring(8), SIZE, slower) == walk_s(
        algorithms.all_reduce_by_ring(8), SIZE, links
    )
    more = walk_s(algorithms.two_shot(8), SIZE, slower) - walk_s(algorithms.two_shot(8), SIZE, links)
    assert more == pytest.approx(2 * 6 * gap_s, rel=1e-6)


@pytest.mark.parametrize("ends", [(0, 1), (1, 0)])
def test_the_ranks_of_a_host_share_its_port_in_each_direction(ends: tuple[int, int]) -> None:
    """Two ranks of host 0 that talk to two other hosts at once take twice as long as one of them alone."""
    links = clustered([0, 0, 1, 2], inner=(0, 1e12), outer=(LATENCY_S, BYTES_S))
    pairs = [((0, 2)[ends[0]], (0, 2)[ends[1]]), ((1, 3)[ends[0]], (1, 3)[ends[1]])]
    for count in (1, 2):
        step = [Transfer(source, target, 0, 0) for source, target in pairs[:count]]
        table = table_of("pairs", "all_reduce", ranks=4, chunks=1, steps=[step])
        assert walk_s(table, SIZE, links) == pytest.approx(LATENCY_S + count * SIZE / BYTES_S, rel=ROUNDING)


def test_a_message_waits_for_both_of_its_ranks() -> None:
    """Rank 2 sends to rank 1, or rank 1 to rank 2, while rank 1 still listens to rank 0."""
    links = uniform(3, latency_s=LATENCY_S, bytes_s=BYTES_S)
    for second in (Transfer(2, 1, 0, 0), Transfer(1, 2, 0, 0)):
        steps = [[Transfer(0, 1, 0, 0)], [second]]
        table = table_of("queue", "all_reduce", ranks=3, chunks=1, steps=steps)
        assert walk_s(table, SIZE, links) == pytest.approx(2 * (LATENCY_S + SIZE / BYTES_S), rel=ROUNDING)


def test_additions_take_their_time() -> None:
    """gamma: a ring adds (n-1)/n of the vector on each rank."""
    links = uniform(4, latency_s=0, bytes_s=BYTES_S)
    plain, adding = (
        walk_s(algorithms.all_reduce_by_ring(4), SIZE, links, add_bytes_s=rate) for rate in (float("inf"), 2e9)
    )
    assert adding - plain == pytest.approx(0.75 * SIZE / 2e9, rel=ROUNDING)


@pytest.mark.parametrize(("local", "hosts"), [(2, 2), (4, 2), (2, 4), (3, 5), (8, 8)])
def test_bytes_between_hosts_are_their_closed_forms(local: int, hosts: int) -> None:
    """A flat ring sends 2 m (n-1)/n S over the m borders that it crosses, a hierarchy 2 (m-1) S."""
    n = local * hosts
    placement = [rank // local for rank in range(n)]
    assert bytes_between(algorithms.all_reduce_by_ring(n), SIZE, placement) == pytest.approx(
        2 * hosts * (n - 1) / n * SIZE
    )
    assert bytes_between(algorithms.hierarchical(local, hosts), SIZE, placement) == pytest.approx(
        2 * (hosts - 1) * SIZE
    )


def test_a_hierarchy_of_two_hosts_by_two_beats_a_flat_ring_by_half() -> None:
    """Where only the bytes between hosts count: 2 (n-1)/n S against 2 (m-1)/m S through each host's port."""
    links = clustered([0, 0, 1, 1], inner=(0, 1e15), outer=(0, BYTES_S))
    flat, two = (
        walk_s(table, SIZE, links) for table in (algorithms.all_reduce_by_ring(4), algorithms.hierarchical(2, 2))
    )
    assert flat / two == pytest.approx(1.5, rel=1e-4)
