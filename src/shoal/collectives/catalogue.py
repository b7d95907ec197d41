"""Every algorithm by its collective, for those who choose among them or check them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from shoal.collectives import binomial, bruck, circulant, direct, double_tree, doubling, ring, two_level
from shoal.collectives.table import CollectiveTable, Kind

Generator = Callable[[int], CollectiveTable]

_BY_RANKS: dict[Kind, tuple[Generator, ...]] = {
    "all_reduce": (
        ring.all_reduce,
        doubling.recursive_doubling,
        doubling.halving_doubling,
        circulant.all_reduce,
        direct.one_shot,
        direct.two_shot,
    ),
    "reduce_scatter": (ring.reduce_scatter, doubling.reduce_scatter, circulant.reduce_scatter, direct.reduce_scatter),
    "all_gather": (ring.all_gather, doubling.all_gather, circulant.all_gather, direct.all_gather),
    "all_to_all": (direct.all_to_all, bruck.all_to_all),
    "broadcast": (binomial.broadcast,),
    "reduce": (binomial.reduce,),
}


@lru_cache(maxsize=16)
def tables(kind: Kind, ranks: int, *, local: int = 1, blocks: int = 1) -> tuple[CollectiveTable, ...]:
    """All algorithms of a collective for `ranks` ranks, `local` on each host; `blocks` are those of pipelined trees."""
    generators = list(_BY_RANKS[kind])
    if kind == "all_reduce":
        generators.append(partial(double_tree.all_reduce, blocks=blocks))
    made = [generator(ranks) for generator in generators]
    if kind == "all_reduce":
        made += _two_level(ranks, local)
    return tuple(made)


def _two_level(ranks: int, local: int) -> list[CollectiveTable]:
    """A hierarchy where hosts are equal and more than one; a torus as square as the number of ranks allows."""
    made = []
    if 1 < local < ranks and ranks % local == 0:
        made.append(two_level.hierarchical(local, ranks // local))
    rows = max(r for r in range(1, int(ranks**0.5) + 1) if ranks % r == 0)
    if rows > 1:
        made.append(two_level.torus(rows, ranks // rows))
    return made
