"""The best plans: every legal one that fits is priced, so that the order is exact under the cost model.

A plan's memory costs less to compute than its time and rules out about half of them, so it comes first; layers are
priced once for all plans that share them. That is fast enough (405B on 16,384 devices in seconds) without a
bound that could lose a plan of the Pareto front.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from shoal.cost.plan import Plan
from shoal.errors import LayoutError
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.search.candidates import Allowed, candidates
from shoal.planner.search.fits import fitting_memory, nothing_fits


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer of a search. `best` is ranked by time; `front` holds what no plan beats in both time and memory."""

    best: tuple[Prediction, ...]
    front: tuple[Prediction, ...]
    considered: int
    fitting: int


Priced = tuple[float, float, Plan]
"""Seconds of a step, bytes of the fullest rank, the plan."""


def search(
    predictor: Predictor,
    allowed: Allowed | None = None,
    *,
    keep: int = 20,
    legal: Callable[[Plan], bool] | None = None,
) -> Found:
    """The `keep` fastest plans that fit, and the Pareto front of time and memory.

    `legal` refuses plans that could not be run for other reasons than the planner knows; only winners are asked.

    Raises:
        LayoutError: nothing fits; the message names what binds and the smallest cluster that would do.
    """
    allowed = _useful(allowed or Allowed(), predictor)
    considered, priced = 0, []
    for plan in candidates(predictor.workload, predictor.cluster, allowed):
        considered += 1
        memory = fitting_memory(predictor, plan)
        if memory is not None:
            priced.append((predictor.bill(plan).total, memory, plan))
    if not priced:
        raise LayoutError(nothing_fits(predictor, allowed, considered))
    admitted = legal or _every_plan
    best = list(islice(_fastest(priced, admitted), keep))
    if not best:
        raise LayoutError(
            f"none of the {len(priced)} plans that fit on {predictor.cluster.name} agrees with what else is asked for: "
            "leave out the keys that fix parts of the layout, or choose one by hand"
        )
    return Found(
        best=tuple(predictor.predict(plan) for plan in best),
        front=tuple(predictor.predict(plan) for plan in _front(priced, admitted)),
        considered=considered,
        fitting=len(priced),
    )


def _useful(allowed: Allowed, predictor: Predictor) -> Allowed:
    """Flash attention recomputes its scores by itself: selective recomputation would be the same plan twice."""
    allowed = allowed.within(predictor.abilities)
    if not predictor.stack.flash_attention:
        return allowed
    return replace(allowed, recompute=tuple(kind for kind in allowed.recompute if kind != "selective") or ("none",))


def _every_plan(plan: Plan) -> bool:
    return True


def _fastest(priced: Iterable[Priced], legal: Callable[[Plan], bool]) -> Iterator[Plan]:
    """By time; among equals, as they were found."""
    heap = [(step_s, number, plan) for number, (step_s, _, plan) in enumerate(priced)]
    heapq.heapify(heap)
    while heap:
        _, _, plan = heapq.heappop(heap)
        if legal(plan):
            yield plan


def _front(priced: Iterable[Priced], legal: Callable[[Plan], bool]) -> list[Plan]:
    """Fastest first; each next one is slower and needs less memory."""
    front, least = [], float("inf")
    for _, memory, plan in sorted(priced, key=lambda entry: (entry[0], entry[1])):
        if memory < least and legal(plan):
            front.append(plan)
            least = memory
    return front
