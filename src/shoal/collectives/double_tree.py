"""Two binary trees, pipelined: logarithmic latency at the full rate (Sanders, Speck and Traeff, "Two-tree algorithms
for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009).

Each tree carries half of the vector, in blocks. A rank that has children in one tree is a leaf of the other, so over
both it sends to at most two ranks and receives from at most two. As a bipartite graph, senders on one side and
receivers on the other, the edges have degree two at most: they can be coloured with two colours, which take the even
and the odd steps. So every rank sends and receives at most one block a step, and both directions of its link are busy.

    reduce, then broadcast of B blocks a tree: about 2 (2B + 2 log2 n) steps of (a + S/2Bw)  ->  2 S/w
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shoal.collectives.table import CollectiveTable, Phase, added, backwards, table_of


class _Edge(NamedTuple):
    tree: int
    child: int
    parent: int


def all_reduce(ranks: int, *, blocks: int = 1) -> CollectiveTable:
    """2 x `blocks` chunks, the first half of them on the first tree."""
    phase = _collected(ranks, blocks)
    steps = phase + backwards(phase)
    return table_of("double tree", "all_reduce", ranks=ranks, chunks=2 * blocks, steps=steps)


def _collected(ranks: int, blocks: int) -> Phase:
    """The sums of both halves at their roots."""
    begins = _begins(_edges(ranks))
    steps: dict[int, list] = defaultdict(list)
    for edge, begin in begins.items():
        for block in range(blocks):
            steps[begin + 2 * block] += added(edge.child, edge.parent, [edge.tree * blocks + block])
    return [steps[step] for step in sorted(steps)]


def _edges(ranks: int) -> list[_Edge]:
    """Towards the roots. The second tree is the first one mirrored, or turned by one rank where n is odd."""
    edges = []
    for rank in range(1, ranks):
        parent = _parent(rank, ranks)
        edges.append(_Edge(0, rank, parent))
        if ranks % 2:
            edges.append(_Edge(1, (rank + 1) % ranks, (parent + 1) % ranks))
        else:
            edges.append(_Edge(1, ranks - 1 - rank, ranks - 1 - parent))
    return edges


def _parent(rank: int, ranks: int) -> int:
    """In the tree in which a rank's height is the number of its trailing zero bits; 0 is the root."""
    lowest = rank & -rank
    above = (rank ^ lowest) | (lowest << 1)
    return above if above < ranks else rank ^ lowest


def _begins(edges: Sequence[_Edge]) -> dict[_Edge, int]:
    """The step of each edge's first block: of its colour's parity, and after those that feed its lower end."""
    colours, begins = _coloured(edges), dict[_Edge, int]()
    feeding: dict[tuple[int, int], list[_Edge]] = defaultdict(list)
    for edge in edges:
        feeding[edge.tree, edge.parent].append(edge)

    def begin(edge: _Edge) -> int:
        if edge not in begins:
            ready = max((begin(lower) + 1 for lower in feeding[edge.tree, edge.child]), default=0)
            begins[edge] = ready + (ready + colours[edge]) % 2
        return begins[edge]

    for edge in edges:
        begin(edge)
    return begins


def _coloured(edges: Sequence[_Edge]) -> dict[_Edge, int]:
    """Two colours, so that edges with a common sender or a common receiver differ."""
    ends: dict[tuple[str, int], list[_Edge]] = defaultdict(list)
    for edge in edges:
        ends["sender", edge.child].append(edge)
        ends["receiver", edge.parent].append(edge)
    colours: dict[_Edge, int] = {}
    for start in edges:
        colours.setdefault(start, 0)
        open_ = [start]
        while open_:
            edge = open_.pop()
            near = ends["sender", edge.child] + ends["receiver", edge.parent]
            new = [other for other in near if other not in colours]
            colours.update(dict.fromkeys(new, 1 - colours[edge]))
            open_ += new
    return colours
