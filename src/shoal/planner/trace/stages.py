"""Which units a pipeline rank holds: the chain is cut as a run cuts it, by the numbers of its matrices.

What lies outside of units (the loss, masks) is the last stage's. Loops lay stage s on rank s mod p, V-shaped schedules
turn round at the last rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cost.plan import Plan
from shoal.parallel.pipeline.cut import balanced_cut
from shoal.schedules.build import fixed_stages_of
from shoal.schedules.placement import looped, v_shaped

Held = frozenset[int | None]


@dataclass(frozen=True)
class Stages:
    """The units of every pipeline rank."""

    held: tuple[Held, ...]

    @classmethod
    def of(cls, plan: Plan, costs: Sequence[float]) -> Stages:
        """`costs` of the chain's parts. Raises `LayoutError` for more stages than parts."""
        ranks = plan.layout.pipeline
        if ranks == 1:
            return cls((frozenset({None, *range(len(costs))}),))
        placement = _placement(plan)
        held: list[set[int | None]] = [set() for _ in range(ranks)]
        for rank, parts in zip(placement, balanced_cut(costs, len(placement)), strict=True):
            held[rank].update(parts)
        held[placement[-1]].add(None)
        return cls(tuple(frozenset(units) for units in held))


def _placement(plan: Plan) -> tuple[int, ...]:
    ranks = plan.layout.pipeline
    return v_shaped(ranks) if fixed_stages_of(plan.schedule) == 2 else looped(ranks, plan.virtual_stages)
