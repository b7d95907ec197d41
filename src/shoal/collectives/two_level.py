"""All-reduce over two levels of rings: hierarchies of hosts, and tori.

Reduce-scatter inside a group, all-reduce of what a rank then holds with its like in the others, all-gather inside:

    hierarchical     ring(g, S; inside) + ring(m, S/g; between)        bytes between hosts: 2 (m-1) S in all,
                                                                      where a flat ring sends 2 m (n-1)/n S
    2-D torus        half of the vector along rows first, the other half along columns first, so that the links of both
                     dimensions are busy from the first step to the last (Ying et al. arXiv:1811.06992 is one half)
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.collectives.table import CollectiveTable, Phase, ring_all_gather, ring_reduce_scatter, side_by_side, table_of
from shoal.errors import LayoutError


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
