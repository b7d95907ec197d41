"""Binomial trees: reduce and broadcast of short vectors in ceil(log2 n) steps, ceil(log2 n) (a + S/w); root 0.

In step k every rank that is an odd multiple of 2^k hands what it has to the rank 2^k before it.
"""

from __future__ import annotations

from shoal.collectives.table import CollectiveTable, Phase, added, backwards, table_of


def reduce(ranks: int) -> CollectiveTable:
    """The sum at rank 0; the others keep partial sums."""
    return table_of("binomial", "reduce", ranks=ranks, chunks=1, steps=_collected(ranks))


def broadcast(ranks: int) -> CollectiveTable:
    """Rank 0's vector everywhere."""
    return table_of("binomial", "broadcast", ranks=ranks, chunks=1, steps=backwards(_collected(ranks)))


def _collected(ranks: int) -> Phase:
    phase, distance = [], 1
    while distance < ranks:
        senders = range(distance, ranks, 2 * distance)
        phase.append([t for rank in senders for t in added(rank, rank - distance, [0])])
        distance *= 2
    return phase
