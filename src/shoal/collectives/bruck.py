"""Bruck's all-to-all: ceil(log2 n) steps, each with about half of what a rank holds, for short messages.

A block for the rank k places further on stands in row k, and travels 2^b places in step b where bit b of k is set:
ceil(log2 n) (a + S/2w) (Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", 1997).
"""

from __future__ import annotations

from shoal.collectives.table import CollectiveTable, Phase, Transfer, table_of


def all_to_all(ranks: int) -> CollectiveTable:
    """Any n. Rows are the output cells; first they are filled by distance, at the end they are put in rank order."""
    n = ranks
    filled = [Transfer(r, r, (r + k) % n, n + k) for r in range(n) for k in range(n)]
    sorted_ = [Transfer(r, r, n + k, n + (r - k) % n) for r in range(n) for k in range(n)]
    steps = [filled, *_travel(n), sorted_]
    return table_of("bruck", "all_to_all", ranks=n, chunks=n, steps=steps, cells=2 * n)


def _travel(n: int) -> Phase:
    phase, hop = [], 1
    while hop < n:
        rows = [k for k in range(n) if k & hop]
        phase.append([Transfer(r, (r + hop) % n, n + k, n + k) for r in range(n) for k in rows])
        hop *= 2
    return phase
