"""Rings: n - 1 steps to reduce-scatter, n - 1 to all-gather, an n-th of the vector in each; any n.

Every link carries 2(n-1)/n of the vector, which no all-reduce can better, at a latency that grows with n (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
"""

from __future__ import annotations

from shoal.collectives.table import CollectiveTable, ring_all_gather, ring_reduce_scatter, table_of


def reduce_scatter(ranks: int) -> CollectiveTable:
    """(n-1) a + (n-1)/n S/w."""
    steps = ring_reduce_scatter(range(ranks), _parts(ranks))
    return table_of("ring", "reduce_scatter", ranks=ranks, chunks=ranks, steps=steps)


def all_gather(ranks: int) -> CollectiveTable:
    """(n-1) a + (n-1)/n S/w."""
    steps = ring_all_gather(range(ranks), _parts(ranks))
    return table_of("ring", "all_gather", ranks=ranks, chunks=ranks, steps=steps)


def all_reduce(ranks: int) -> CollectiveTable:
    """One after the other: 2(n-1) a + 2 (n-1)/n S/w."""
    members, parts = range(ranks), _parts(ranks)
    steps = ring_reduce_scatter(members, parts) + ring_all_gather(members, parts)
    return table_of("ring", "all_reduce", ranks=ranks, chunks=ranks, steps=steps)


def _parts(ranks: int) -> list[list[int]]:
    return [[rank] for rank in range(ranks)]
