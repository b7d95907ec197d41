"""The cheapest choice for every variable of a graph, exactly, by eliminating variables one by one.

    minimise  sum_v own_v(x_v) + sum_(u,v) between_uv(x_u, x_v)

To eliminate v, all tables that mention it are added and minimised over x_v: a table over its neighbours stands for it
from then on (non-serial dynamic programming, Bertele and Brioschi 1972). On a chain that is the usual dynamic program,
on series-parallel graphs a table that is left has two variables, and on any graph the result is exact; time and memory
grow with the most neighbours that a variable has when its turn comes. The one with the smallest table goes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shoal.errors import UserCodeError

MOST_ENTRIES = 1 << 24
"""A table of 128 MiB."""

Edge = tuple[int, int]


@dataclass(frozen=True)
class _Table:
    """Costs over some variables, in rising order; one dimension of `costs` for each."""

    variables: tuple[int, ...]
    costs: np.ndarray


@dataclass(frozen=True)
class Cheapest:
    """The choice of each variable, and what all of it costs."""

    choices: tuple[int, ...]
    cost: float


def cheapest(own: Sequence[np.ndarray], between: Mapping[Edge, np.ndarray]) -> Cheapest:
    """`own[v]` [choices of v]; `between[u, v]` [choices of u, choices of v], u < v. Infinite costs forbid.

    Raises `UserCodeError` where the graph is too tangled for an exact answer.
    """
    work = _Elimination(own, between)
    while work.left:
        work.eliminate(min(work.left, key=lambda v: (work.left[v], v)))
    return Cheapest(work.choices(), work.cost)


class _Elimination:
    """Tables that are left, by number; `left` has the entries of the table that each variable would make."""

    def __init__(self, own: Sequence[np.ndarray], between: Mapping[Edge, np.ndarray]) -> None:
        self._sizes = [len(costs) for costs in own]
        self._tables: dict[int, _Table] = {}
        self._mentions: list[set[int]] = [set() for _ in own]
        self._made: list[tuple[int, _Table]] = []
        self._count = 0
        self.cost = 0.0
        for v, costs in enumerate(own):
            self._add(_Table((v,), costs))
        for edge, costs in between.items():
            self._add(_Table(edge, costs))
        self.left = {v: self._entries(v) for v in range(len(own))}

    def eliminate(self, v: int) -> None:
        """Puts one table over the neighbours of `v` in the place of all that mention it."""
        joined = self._joined(v)
        rest = tuple(one for one in joined.variables if one != v)
        self._made.append((v, joined))
        del self.left[v]
        self._add(_Table(rest, joined.costs.min(axis=joined.variables.index(v))))
        for one in rest:
            self.left[one] = self._entries(one)

    def choices(self) -> tuple[int, ...]:
        """Backwards: the last variable to go depends on nothing."""
        chosen: dict[int, int] = {}
        for v, table in reversed(self._made):
            place = tuple(chosen[one] if one != v else slice(None) for one in table.variables)
            chosen[v] = int(np.argmin(table.costs[place]))
        return tuple(chosen[v] for v in range(len(self._sizes)))

    def _add(self, table: _Table) -> None:
        if not table.variables:
            self.cost += float(table.costs)
            return
        self._tables[self._count] = table
        for v in table.variables:
            self._mentions[v].add(self._count)
        self._count += 1

    def _scope(self, v: int) -> tuple[int, ...]:
        return tuple(sorted({one for number in self._mentions[v] for one in self._tables[number].variables}))

    def _entries(self, v: int) -> int:
        return prod(self._sizes[one] for one in self._scope(v))

    def _joined(self, v: int) -> _Table:
        scope = self._scope(v)
        if self.left[v] > MOST_ENTRIES:
            raise UserCodeError(
                f"an exact choice of splits needs a table of {self.left[v]:.2g} costs, since {len(scope)} operators of "
                "the model hang together; declare roles instead (parameter_roles())"
            )
        total = np.zeros([self._sizes[one] for one in scope])
        for number in sorted(self._mentions[v]):
            table = self._tables.pop(number)
            total += table.costs.reshape([self._sizes[one] if one in table.variables else 1 for one in scope])
            for one in table.variables:
                self._mentions[one].discard(number)
        return _Table(scope, total)
