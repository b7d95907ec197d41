"""The best plans: every legal one that fits is priced, so that the order is exact under the cost model.

Where none fits: what binds, and the smallest cluster that would do. A plan's memory costs less to compute than its time
and rules out about half of them, so it comes first; layers are priced once for all plans that share them. That is fast
enough (405B on 16,384 devices in seconds) without a bound that could lose a plan of the Pareto front.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from shoal.cost.footprint import Footprint
from shoal.cost.plan import Plan
from shoal.errors import LayoutError
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.search.candidates import Allowed, candidates

TRIED_ONE_BY_ONE, MOST_TIMES = 32, 64
"""Numbers of nodes above the fewest that could do; multiples of the cluster after that."""


def fitting_memory(predictor: Predictor, plan: Plan) -> float | None:
    """Bytes of the fullest rank; None where they are more than the device has."""
    limit, peak = predictor.cluster.device.memory_bytes, 0.0
    for rank in sorted({0, min(1, plan.layout.pipeline - 1), plan.layout.pipeline - 1}):
        peak = max(peak, predictor.footprint(plan, rank).total)
        if peak > limit:
            return None
    return peak


def nothing_fits(predictor: Predictor, allowed: Allowed, considered: int) -> str:
    """One sentence: no layout is legal; or the smallest plan, what of it is largest, and what would do."""
    name, have = predictor.cluster.name, predictor.cluster.device.memory_bytes
    if not considered:
        return (
            f"no layout of {predictor.cluster.devices} devices is legal for this model and a global batch of "
            f"{predictor.workload.global_samples}: change the batch so that the data-parallel ranks divide it, or "
            "allow more axes"
        )
    plans = candidates(predictor.workload, predictor.cluster, allowed)
    plan, peak = min(((p, _peak(predictor, p)) for p in plans), key=lambda pair: pair[1].total)
    item, size = max(peak.items().items(), key=lambda pair: pair[1])
    return (
        f"nothing fits on {name}: of {considered} plans the smallest ({plan.describe()}) needs "
        f"{peak.total / 2**30:.1f} GiB a device, {size / 2**30:.1f} of them {item}, and a device has "
        f"{have / 2**30:.1f}: {_what_would_do(predictor, allowed)}"
    )


def smallest_cluster(predictor: Predictor, allowed: Allowed) -> int | None:
    """The fewest nodes of this kind, more than there are, on which a plan fits; None up to `MOST_TIMES` as many.

    Far above the fewest that could hold the state, multiples of the cluster alone are tried.
    """
    return next((nodes for nodes in _numbers(predictor) if _any_fits(predictor, allowed, nodes)), None)


def fewest_nodes(predictor: Predictor) -> int:
    """Nodes whose memory is as much as one copy of weights, gradients and optimizer: with fewer, nothing can fit."""
    state, cluster = predictor.stack.state, predictor.cluster
    whole = predictor.parameters * (state.weight + state.gradient + state.optimizer)
    return max(1, math.ceil(whole / (cluster.machine.devices * cluster.device.memory_bytes)))


def _numbers(predictor: Predictor) -> Iterator[int]:
    """Numbers of nodes to try, fewest first."""
    nodes = predictor.cluster.nodes
    first = max(nodes + 1, fewest_nodes(predictor))
    last = nodes * MOST_TIMES
    yield from range(first, min(first + TRIED_ONE_BY_ONE, last + 1))
    yield from (n for power in range(1, 7) if first + TRIED_ONE_BY_ONE <= (n := nodes * 2**power) <= last)


def _any_fits(predictor: Predictor, allowed: Allowed, nodes: int) -> bool:
    larger = predictor.on(predictor.cluster.with_nodes(nodes))
    plans = candidates(larger.workload, larger.cluster, allowed)
    return any(fitting_memory(larger, plan) is not None for plan in plans)


def _what_would_do(predictor: Predictor, allowed: Allowed) -> str:
    nodes = smallest_cluster(predictor, allowed)
    if nodes is None:
        return f"no cluster of up to {MOST_TIMES} times its nodes would do either; use devices with more memory"
    return f"{nodes} nodes of it would do"


def _peak(predictor: Predictor, plan: Plan) -> Footprint:
    return max(predictor.footprints(plan), key=lambda one: one.total)


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
