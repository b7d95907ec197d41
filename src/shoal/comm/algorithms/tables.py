"""`Tables`: which table makes a collective of some size, on given links. Holds no group, so that it keeps none open."""

from __future__ import annotations

import math

from shoal.collectives.table import Kind, Table
from shoal.comm.algorithms.choose import choose, choose_named
from shoal.topology.links import Links


class Tables:
    """Chosen once for each power of two. `name`: all-reduces by the algorithm of that name, wherever the links lead."""

    def __init__(self, links: Links, *, add_bytes_s: float = math.inf, name: str | None = None) -> None:
        self._links, self._add_bytes_s, self._name = links, add_bytes_s, name
        self._made: dict[tuple[Kind, int, int], Table] = {}

    @property
    def ranks(self) -> int:
        """How many ranks a table is for."""
        return self._links.ranks

    def __call__(self, kind: Kind, size_bytes: int, *, root: int = 0) -> Table:
        """For the whole vector of `size_bytes`, or for what one rank holds for an all-to-all."""
        key = (kind, size_bytes.bit_length(), root)
        if key not in self._made:
            self._made[key] = self._choose(kind, float(1 << size_bytes.bit_length()), root)
        return self._made[key]

    def _choose(self, kind: Kind, size: float, root: int) -> Table:
        named = choose_named(self._name, kind, size, self._links, root=root) if self._name else None
        return (named or choose(kind, size, self._links, root=root, add_bytes_s=self._add_bytes_s)).table
