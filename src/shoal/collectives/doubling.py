"""Recursive doubling and halving: log2 n steps with partners at distances 1, 2, 4, ...

Recursive doubling sends the whole vector in each step, for short ones: log2 n (a + S/w). Halving-doubling is a
reduce-scatter by recursive halving and an all-gather by recursive doubling, 2 log2 n a + 2 (n-1)/n S/w (Rabenseifner,
"Optimization of collective reduction operations", 2004; Thakur, Rabenseifner and Gropp 2005).

Where n is not a power of two, the first n - 2^k odd ranks fold: they hand their vector to the even rank before them,
which works for both, and get the result back.
"""

from __future__ import annotations

from shoal.collectives.table import CollectiveTable, Phase, added, backwards, copied, halving, table_of


def recursive_doubling(ranks: int) -> CollectiveTable:
    """All-reduce of a vector that is not split; both partners add the same two numbers, so all get the same bits."""
    members, steps, distance = _members(ranks), _folded(ranks, 1), 1
    while distance < len(members):
        pairs = [(rank, members[i ^ distance]) for i, rank in enumerate(members)]
        steps.append([t for rank, partner in pairs for t in added(rank, partner, [0])])
        distance *= 2
    steps += backwards(_folded(ranks, 1))
    return table_of("recursive doubling", "all_reduce", ranks=ranks, chunks=1, steps=steps)


def reduce_scatter(ranks: int) -> CollectiveTable:
    """Recursive halving; log2 n a + (n-1)/n S/w where n is a power of two."""
    steps = _folded(ranks, ranks) + halving(_members(ranks), _parts(ranks)) + _given(ranks)
    return table_of("halving", "reduce_scatter", ranks=ranks, chunks=ranks, steps=steps)


def all_gather(ranks: int) -> CollectiveTable:
    """Recursive doubling, the reduce-scatter played backwards."""
    steps = backwards(_given(ranks)) + backwards(halving(_members(ranks), _parts(ranks)))
    steps += backwards(_folded(ranks, ranks))
    return table_of("doubling", "all_gather", ranks=ranks, chunks=ranks, steps=steps)


def halving_doubling(ranks: int) -> CollectiveTable:
    """Rabenseifner's all-reduce."""
    halves = halving(_members(ranks), _parts(ranks))
    fold = _folded(ranks, ranks)
    steps = fold + halves + backwards(halves) + backwards(fold)
    return table_of("halving-doubling", "all_reduce", ranks=ranks, chunks=ranks, steps=steps)


def _extra(ranks: int) -> int:
    """How many ranks are too many for a power of two."""
    return ranks - (1 << (ranks.bit_length() - 1))


def _members(ranks: int) -> list[int]:
    """Those that stay when the others have folded."""
    extra = _extra(ranks)
    return [2 * i for i in range(extra)] + list(range(2 * extra, ranks))


def _parts(ranks: int) -> list[list[int]]:
    """The cells of each member: its own, and that of the rank which folded into it."""
    extra = _extra(ranks)
    return [[2 * i, 2 * i + 1] for i in range(extra)] + [[rank] for rank in range(2 * extra, ranks)]


def _folded(ranks: int, chunks: int) -> Phase:
    """At most one step: odd ranks add their whole vector to their neighbour's."""
    return [[t for i in range(_extra(ranks)) for t in added(2 * i + 1, 2 * i, range(chunks))]]


def _given(ranks: int) -> Phase:
    """At most one step: those that folded get their own chunk."""
    return [[t for i in range(_extra(ranks)) for t in copied(2 * i, 2 * i + 1, [2 * i + 1])]]
