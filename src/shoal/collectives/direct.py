"""Direct algorithms: everybody talks to everybody, without relays.

one-shot all-reduce     a + (n-1) S/w              everyone gets all vectors, and adds them in the order of the ranks
two-shot all-reduce     2a + 2 (n-1)/n S/w         everyone gets its chunk of all, adds, and hands the sum out
all-to-all              (n-1) a + (n-1)/n S/w      one partner a step, so that no receiver is flooded
"""

from __future__ import annotations

from shoal.collectives.table import CollectiveTable, Phase, Transfer, added, backwards, table_of


def one_shot(ranks: int) -> CollectiveTable:
    """All-reduce. Cell 1 + r holds the vector of rank r until it is added: the same order, and bits, everywhere."""
    own = [Transfer(rank, rank, 0, 1 + rank) for rank in range(ranks)]
    sent = [Transfer(rank, to, 0, 1 + rank) for rank in range(ranks) for to in range(ranks) if to != rank]
    sums = [Transfer(rank, rank, 1 + source, 0, source > 0) for rank in range(ranks) for source in range(ranks)]
    return table_of("one-shot", "all_reduce", ranks=ranks, chunks=1, steps=[own + sent, sums], cells=1 + ranks)


def reduce_scatter(ranks: int) -> CollectiveTable:
    """Everyone's chunk straight to its owner: a + (n-1)/n S/w."""
    return table_of("direct", "reduce_scatter", ranks=ranks, chunks=ranks, steps=_collected(ranks))


def all_gather(ranks: int) -> CollectiveTable:
    """Every chunk straight from its owner: a + (n-1)/n S/w."""
    return table_of("direct", "all_gather", ranks=ranks, chunks=ranks, steps=backwards(_collected(ranks)))


def two_shot(ranks: int) -> CollectiveTable:
    """All-reduce."""
    phase = _collected(ranks)
    return table_of("two-shot", "all_reduce", ranks=ranks, chunks=ranks, steps=phase + backwards(phase))


def all_to_all(ranks: int) -> CollectiveTable:
    """In step s rank r sends to r + s and receives from r - s. Cell n + i is what came from rank i."""
    steps = [[Transfer(r, (r + s) % ranks, (r + s) % ranks, ranks + r) for r in range(ranks)] for s in range(ranks)]
    return table_of("direct", "all_to_all", ranks=ranks, chunks=ranks, steps=steps, cells=2 * ranks)


def _collected(ranks: int) -> Phase:
    return [[t for rank in range(ranks) for to in range(ranks) if to != rank for t in added(rank, to, [to])]]
