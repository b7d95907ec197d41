"""Circulant graphs: halving at the distances ceil(n/2), ceil(n/4), ... 1, for any n without folding.

Rank r keeps the chunks of ranks r, r+1, ..., r+s-1; a step at distance d = ceil(s/2) sends the last s - d of them to
rank r + d, to which they are the first s - d. ceil(log2 n) steps and (n-1)/n of the vector are optimal for every n
(Traeff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234).
"""

from __future__ import annotations

from shoal.collectives.table import CollectiveTable, Phase, added, backwards, table_of


def reduce_scatter(ranks: int) -> CollectiveTable:
    """ceil(log2 n) a + (n-1)/n S/w."""
    return table_of("circulant", "reduce_scatter", ranks=ranks, chunks=ranks, steps=_collected(ranks))


def all_gather(ranks: int) -> CollectiveTable:
    """ceil(log2 n) a + (n-1)/n S/w."""
    return table_of("circulant", "all_gather", ranks=ranks, chunks=ranks, steps=backwards(_collected(ranks)))


def all_reduce(ranks: int) -> CollectiveTable:
    """2 ceil(log2 n) a + 2 (n-1)/n S/w."""
    phase = _collected(ranks)
    return table_of("circulant", "all_reduce", ranks=ranks, chunks=ranks, steps=phase + backwards(phase))


def _collected(ranks: int) -> Phase:
    """The reduce-scatter."""
    phase, kept = [], ranks
    while kept > 1:
        distance = (kept + 1) // 2
        moved = range(distance, kept)
        phase.append(
            [
                transfer
                for rank in range(ranks)
                for transfer in added(rank, (rank + distance) % ranks, [(rank + i) % ranks for i in moved])
            ]
        )
        kept = distance
    return phase
