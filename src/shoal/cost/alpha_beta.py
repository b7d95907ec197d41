"""Seconds of a collective: a latency for each step, and bytes over a rate (Hockney's alpha-beta model).

n ranks, S bytes (of the whole vector), latency a of one step, rate w. Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), except where noted:

    ring all-reduce              2(n-1) a + 2 (n-1)/n S/w
    ring all-gather, reduce-scatter   half of it
    recursive doubling           log2 n (a + S/w)
    halving-doubling             2 log2 n a + 2 (n-1)/n S/w
    double binary tree           2 log2 n a + 2 S/w             Sanders et al. 2009; NCCL's tree
    pairwise all-to-all          (n-1) a + (n-1)/n S/w          S: what one rank holds
    Bruck all-to-all             log2 n (a + S/2w)
    one-shot, two-shot           a + (n-1) S/w;  2a + 2 (n-1)/n S/w     through shared memory
    hierarchical all-reduce      reduce-scatter inside, all-reduce of S/g between, all-gather inside

All are monotone: more bytes, more ranks, a larger latency or a lower rate never make them faster.
"""

from __future__ import annotations

import math


def ring_all_reduce(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """A reduce-scatter and an all-gather around a ring."""
    return 2 * ring_all_gather(ranks, size, latency_s=latency_s, bytes_s=bytes_s)


def ring_all_gather(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """Also a reduce-scatter; `size` is the whole vector."""
    return (ranks - 1) * latency_s + (ranks - 1) / ranks * size / bytes_s


def recursive_doubling(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """All-reduce of short vectors."""
    return math.ceil(math.log2(ranks)) * (latency_s + size / bytes_s)


def halving_doubling(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """All-reduce by recursive halving, then doubling (Rabenseifner)."""
    return 2 * math.ceil(math.log2(ranks)) * latency_s + 2 * (ranks - 1) / ranks * size / bytes_s


def double_binary_tree(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """All-reduce over two trees that use both directions of every link."""
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * latency_s + 2 * size / bytes_s


def pairwise_all_to_all(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """Every rank sends an n-th of its `size` bytes to each other rank."""
    return (ranks - 1) * latency_s + (ranks - 1) / ranks * size / bytes_s


def bruck_all_to_all(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """All-to-all of short messages (Bruck et al. 1997)."""
    return math.ceil(math.log2(ranks)) * (latency_s + size / (2 * bytes_s))


def one_shot(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """Every rank reads all others' vectors."""
    return (latency_s + (ranks - 1) * size / bytes_s) if ranks > 1 else 0.0


def two_shot(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """Every rank sums its share, then reads the other shares."""
    return (2 * latency_s + 2 * (ranks - 1) / ranks * size / bytes_s) if ranks > 1 else 0.0


def hierarchical_all_reduce(
    local: int, nodes: int, size: float, *, inner: tuple[float, float], outer: tuple[float, float]
) -> float:
    """`inner` and `outer` are (latency_s, bytes_s) of one rank inside a node and between nodes."""
    inside = ring_all_reduce(local, size, latency_s=inner[0], bytes_s=inner[1])
    between = ring_all_reduce(nodes, size / local, latency_s=outer[0], bytes_s=outer[1])
    return inside + between


def torus_all_reduce(rows: int, columns: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """Rings along one dimension, then rings along the other with what is left of the vector."""
    first = ring_all_reduce(columns, size, latency_s=latency_s, bytes_s=bytes_s)
    return first + ring_all_reduce(rows, size / columns, latency_s=latency_s, bytes_s=bytes_s)
