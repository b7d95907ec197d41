"""The algorithms of collectives as tables, each with its closed form and its source; the catalogue of all of them at
the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from shoal.collectives.table import (
    CollectiveTable,
    Kind,
    Phase,
    Transfer,
    added,
    backwards,
    copied,
    halving,
    ring_all_gather,
    ring_reduce_scatter,
    side_by_side,
    table_of,
)
from shoal.errors import LayoutError

# Binomial trees: reduce and broadcast of short vectors in ceil(log2 n) steps, ceil(log2 n) (a + S/w); root 0.
#
# In step k every rank that is an odd multiple of 2^k hands what it has to the rank 2^k before it.


def reduce_by_binomial_tree(ranks: int) -> CollectiveTable:
    """The sum at rank 0; the others keep partial sums."""
    return table_of("binomial", "reduce", ranks=ranks, chunks=1, steps=_binomial_collected(ranks))


def broadcast_by_binomial_tree(ranks: int) -> CollectiveTable:
    """Rank 0's vector everywhere."""
    return table_of("binomial", "broadcast", ranks=ranks, chunks=1, steps=backwards(_binomial_collected(ranks)))


def _binomial_collected(ranks: int) -> Phase:
    phase, distance = [], 1
    while distance < ranks:
        senders = range(distance, ranks, 2 * distance)
        phase.append([t for rank in senders for t in added(rank, rank - distance, [0])])
        distance *= 2
    return phase


# Bruck's all-to-all: ceil(log2 n) steps, each with about half of what a rank holds, for short messages.
#
# A block for the rank k places further on stands in row k, and travels 2^b places in step b where bit b of k is set:
# ceil(log2 n) (a + S/2w) (Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications
# in multiport message-passing systems", 1997).


def all_to_all_by_bruck(ranks: int) -> CollectiveTable:
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


# Circulant graphs: halving at the distances ceil(n/2), ceil(n/4), ... 1, for any n without folding.
#
# Rank r keeps the chunks of ranks r, r+1, ..., r+s-1; a step at distance d = ceil(s/2) sends the last s - d of them to
# rank r + d, to which they are the first s - d. ceil(log2 n) steps and (n-1)/n of the vector are optimal for every n
# (Traeff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234).


def reduce_scatter_by_circulant(ranks: int) -> CollectiveTable:
    """ceil(log2 n) a + (n-1)/n S/w."""
    return table_of("circulant", "reduce_scatter", ranks=ranks, chunks=ranks, steps=_circulant_collected(ranks))


def all_gather_by_circulant(ranks: int) -> CollectiveTable:
    """ceil(log2 n) a + (n-1)/n S/w."""
    return table_of("circulant", "all_gather", ranks=ranks, chunks=ranks, steps=backwards(_circulant_collected(ranks)))


def all_reduce_by_circulant(ranks: int) -> CollectiveTable:
    """2 ceil(log2 n) a + 2 (n-1)/n S/w."""
    phase = _circulant_collected(ranks)
    return table_of("circulant", "all_reduce", ranks=ranks, chunks=ranks, steps=phase + backwards(phase))


def _circulant_collected(ranks: int) -> Phase:
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


# Direct algorithms: everybody talks to everybody, without relays.
#
# one-shot all-reduce     a + (n-1) S/w              everyone gets all vectors, and adds them in the order of the ranks
# two-shot all-reduce     2a + 2 (n-1)/n S/w         everyone gets its chunk of all, adds, and hands the sum out
# all-to-all              (n-1) a + (n-1)/n S/w      one partner a step, so that no receiver is flooded


def one_shot(ranks: int) -> CollectiveTable:
    """All-reduce. Cell 1 + r holds the vector of rank r until it is added: the same order, and bits, everywhere."""
    own = [Transfer(rank, rank, 0, 1 + rank) for rank in range(ranks)]
    sent = [Transfer(rank, to, 0, 1 + rank) for rank in range(ranks) for to in range(ranks) if to != rank]
    sums = [Transfer(rank, rank, 1 + source, 0, source > 0) for rank in range(ranks) for source in range(ranks)]
    return table_of("one-shot", "all_reduce", ranks=ranks, chunks=1, steps=[own + sent, sums], cells=1 + ranks)


def reduce_scatter_by_direct(ranks: int) -> CollectiveTable:
    """Everyone's chunk straight to its owner: a + (n-1)/n S/w."""
    return table_of("direct", "reduce_scatter", ranks=ranks, chunks=ranks, steps=_direct_collected(ranks))


def all_gather_by_direct(ranks: int) -> CollectiveTable:
    """Every chunk straight from its owner: a + (n-1)/n S/w."""
    return table_of("direct", "all_gather", ranks=ranks, chunks=ranks, steps=backwards(_direct_collected(ranks)))


def two_shot(ranks: int) -> CollectiveTable:
    """All-reduce."""
    phase = _direct_collected(ranks)
    return table_of("two-shot", "all_reduce", ranks=ranks, chunks=ranks, steps=phase + backwards(phase))


def all_to_all_by_direct(ranks: int) -> CollectiveTable:
    """In step s rank r sends to r + s and receives from r - s. Cell n + i is what came from rank i."""
    steps = [[Transfer(r, (r + s) % ranks, (r + s) % ranks, ranks + r) for r in range(ranks)] for s in range(ranks)]
    return table_of("direct", "all_to_all", ranks=ranks, chunks=ranks, steps=steps, cells=2 * ranks)


def _direct_collected(ranks: int) -> Phase:
    return [[t for rank in range(ranks) for to in range(ranks) if to != rank for t in added(rank, to, [to])]]


# Recursive doubling and halving: log2 n steps with partners at distances 1, 2, 4, ...
#
# Recursive doubling sends the whole vector in each step, for short ones: log2 n (a + S/w). Halving-doubling is a
# reduce-scatter by recursive halving and an all-gather by recursive doubling, 2 log2 n a + 2 (n-1)/n S/w (Rabenseifner,
# "Optimization of collective reduction operations", 2004; Thakur, Rabenseifner and Gropp 2005).
#
# Where n is not a power of two, the first n - 2^k odd ranks fold: they hand their vector to the even rank before them,
# which works for both, and get the result back.


def recursive_doubling(ranks: int) -> CollectiveTable:
    """All-reduce of a vector that is not split; both partners add the same two numbers, so all get the same bits."""
    members, steps, distance = _members(ranks), _folded(ranks, 1), 1
    while distance < len(members):
        pairs = [(rank, members[i ^ distance]) for i, rank in enumerate(members)]
        steps.append([t for rank, partner in pairs for t in added(rank, partner, [0])])
        distance *= 2
    steps += backwards(_folded(ranks, 1))
    return table_of("recursive doubling", "all_reduce", ranks=ranks, chunks=1, steps=steps)


def reduce_scatter_by_halving(ranks: int) -> CollectiveTable:
    """Recursive halving; log2 n a + (n-1)/n S/w where n is a power of two."""
    steps = _folded(ranks, ranks) + halving(_members(ranks), _halves(ranks)) + _given(ranks)
    return table_of("halving", "reduce_scatter", ranks=ranks, chunks=ranks, steps=steps)


def all_gather_by_doubling(ranks: int) -> CollectiveTable:
    """Recursive doubling, the reduce-scatter played backwards."""
    steps = backwards(_given(ranks)) + backwards(halving(_members(ranks), _halves(ranks)))
    steps += backwards(_folded(ranks, ranks))
    return table_of("doubling", "all_gather", ranks=ranks, chunks=ranks, steps=steps)


def halving_doubling(ranks: int) -> CollectiveTable:
    """Rabenseifner's all-reduce."""
    halves = halving(_members(ranks), _halves(ranks))
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


def _halves(ranks: int) -> list[list[int]]:
    """The cells of each member: its own, and that of the rank which folded into it."""
    extra = _extra(ranks)
    return [[2 * i, 2 * i + 1] for i in range(extra)] + [[rank] for rank in range(2 * extra, ranks)]


def _folded(ranks: int, chunks: int) -> Phase:
    """At most one step: odd ranks add their whole vector to their neighbour's."""
    return [[t for i in range(_extra(ranks)) for t in added(2 * i + 1, 2 * i, range(chunks))]]


def _given(ranks: int) -> Phase:
    """At most one step: those that folded get their own chunk."""
    return [[t for i in range(_extra(ranks)) for t in copied(2 * i, 2 * i + 1, [2 * i + 1])]]


# Rings: n - 1 steps to reduce-scatter, n - 1 to all-gather, an n-th of the vector in each; any n.
#
# Every link carries 2(n-1)/n of the vector, which no all-reduce can better, at a latency that grows with n (Patarasuk
# and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).


def reduce_scatter_by_ring(ranks: int) -> CollectiveTable:
    """(n-1) a + (n-1)/n S/w."""
    steps = ring_reduce_scatter(range(ranks), _parts(ranks))
    return table_of("ring", "reduce_scatter", ranks=ranks, chunks=ranks, steps=steps)


def all_gather_by_ring(ranks: int) -> CollectiveTable:
    """(n-1) a + (n-1)/n S/w."""
    steps = ring_all_gather(range(ranks), _parts(ranks))
    return table_of("ring", "all_gather", ranks=ranks, chunks=ranks, steps=steps)


def all_reduce_by_ring(ranks: int) -> CollectiveTable:
    """One after the other: 2(n-1) a + 2 (n-1)/n S/w."""
    members, parts = range(ranks), _parts(ranks)
    steps = ring_reduce_scatter(members, parts) + ring_all_gather(members, parts)
    return table_of("ring", "all_reduce", ranks=ranks, chunks=ranks, steps=steps)


def _parts(ranks: int) -> list[list[int]]:
    return [[rank] for rank in range(ranks)]


# All-reduce over two levels of rings: hierarchies of hosts, and tori.
#
# Reduce-scatter inside a group, all-reduce of what a rank then holds with its like in the others, all-gather inside:
#
#   hierarchical     ring(g, S; inside) + ring(m, S/g; between)        bytes between hosts: 2 (m-1) S in all,
#                                                                     where a flat ring sends 2 m (n-1)/n S
#   2-D torus        half of the vector along rows first, the other half along columns first, so that the links of both
#                    dimensions are busy from the first step to the last (Ying et al. arXiv:1811.06992 is one half)


def hierarchical(local: int, hosts: int) -> CollectiveTable:
    """Ranks h x local to (h+1) x local - 1 share host h."""
    ranks = local * hosts
    groups = [range(host * local, (host + 1) * local) for host in range(hosts)]
    steps = _two_levels(groups, first_cell=0)
    return table_of("hierarchical", "all_reduce", ranks=ranks, chunks=ranks, steps=steps)


def torus(rows: int, columns: int) -> CollectiveTable:
    """Rank r x columns + c stands in row r and column c."""
    if rows < 1 or columns < 1:
        raise LayoutError(f"a torus of {rows} x {columns} ranks: both have to be 1 or more; name two factors of n")
    ranks = rows * columns
    along_rows = [range(row * columns, (row + 1) * columns) for row in range(rows)]
    along_columns = [range(column, ranks, columns) for column in range(columns)]
    halves = [_two_levels(along_rows, first_cell=0), _two_levels(along_columns, first_cell=ranks)]
    return table_of("torus", "all_reduce", ranks=ranks, chunks=2 * ranks, steps=side_by_side(*halves))


def _two_levels(groups: Sequence[Sequence[int]], *, first_cell: int) -> Phase:
    """Place p of every group owns as many cells as there are groups, one for each of its like."""
    many = len(groups)
    parts = [[first_cell + place * many + k for k in range(many)] for place in range(len(groups[0]))]
    like = [[group[place] for group in groups] for place in range(len(groups[0]))]
    single = [[[cell] for cell in part] for part in parts]
    inside = side_by_side(*(ring_reduce_scatter(group, parts) for group in groups))
    reduced = side_by_side(*(ring_reduce_scatter(*pair) for pair in zip(like, single, strict=True)))
    gathered = side_by_side(*(ring_all_gather(*pair) for pair in zip(like, single, strict=True)))
    return inside + reduced + gathered + side_by_side(*(ring_all_gather(group, parts) for group in groups))


# Two binary trees, pipelined: logarithmic latency at the full rate (Sanders, Speck and Traeff, "Two-tree algorithms
# for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009).
#
# Each tree carries half of the vector, in blocks. A rank that has children in one tree is a leaf of the other, so over
# both it sends to at most two ranks and receives from at most two. As a bipartite graph, senders on one side and
# receivers on the other, the edges have degree two at most: they can be coloured with two colours, which take the even
# and the odd steps. So every rank sends and receives at most one block a step, and both directions of its link are
# busy.
#
#     reduce, then broadcast of B blocks a tree: about 2 (2B + 2 log2 n) steps of (a + S/2Bw)  ->  2 S/w


class _Edge(NamedTuple):
    tree: int
    child: int
    parent: int


def all_reduce_by_double_tree(ranks: int, *, blocks: int = 1) -> CollectiveTable:
    """2 x `blocks` chunks, the first half of them on the first tree."""
    phase = _tree_collected(ranks, blocks)
    steps = phase + backwards(phase)
    return table_of("double tree", "all_reduce", ranks=ranks, chunks=2 * blocks, steps=steps)


def _tree_collected(ranks: int, blocks: int) -> Phase:
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


# Every algorithm by its collective, for those who choose among them or check them all.


Generator = Callable[[int], CollectiveTable]

_BY_RANKS: dict[Kind, tuple[Generator, ...]] = {
    "all_reduce": (
        all_reduce_by_ring,
        recursive_doubling,
        halving_doubling,
        all_reduce_by_circulant,
        one_shot,
        two_shot,
    ),
    "reduce_scatter": (
        reduce_scatter_by_ring,
        reduce_scatter_by_halving,
        reduce_scatter_by_circulant,
        reduce_scatter_by_direct,
    ),
    "all_gather": (all_gather_by_ring, all_gather_by_doubling, all_gather_by_circulant, all_gather_by_direct),
    "all_to_all": (all_to_all_by_direct, all_to_all_by_bruck),
    "broadcast": (broadcast_by_binomial_tree,),
    "reduce": (reduce_by_binomial_tree,),
}


@lru_cache(maxsize=16)
def tables(kind: Kind, ranks: int, *, local: int = 1, blocks: int = 1) -> tuple[CollectiveTable, ...]:
    """All algorithms of a collective for `ranks` ranks, `local` on each host; `blocks` are those of pipelined trees."""
    generators = list(_BY_RANKS[kind])
    if kind == "all_reduce":
        generators.append(partial(all_reduce_by_double_tree, blocks=blocks))
    made = [generator(ranks) for generator in generators]
    if kind == "all_reduce":
        made += _two_level(ranks, local)
    return tuple(made)


def _two_level(ranks: int, local: int) -> list[CollectiveTable]:
    """A hierarchy where hosts are equal and more than one; a torus as square as the number of ranks allows."""
    made = []
    if 1 < local < ranks and ranks % local == 0:
        made.append(hierarchical(local, ranks // local))
    rows = max(r for r in range(1, int(ranks**0.5) + 1) if ranks % r == 0)
    if rows > 1:
        made.append(torus(rows, ranks // rows))
    return made
