"""The best plans: every legal one that fits is priced, so that the order is exact under the cost model.

A plan's memory costs less to compute than its time and rules out about half of them, so it comes first; layers are
priced once for all plans that share them. That is fast enough (405B on 16,384 devices in seconds) without a
bound that could lose a plan of the Pareto front.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shoal.cost.footprint import Footprint
from shoal.cost.plan import Plan
from shoal.errors import LayoutError
from shoal.planner.candidates import Allowed, candidates
from shoal.planner.predictor import Prediction, Predictor


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer of a search. `best` is ranked by time; `front` holds what no plan beats in both time and memory."""

    best: tuple[Prediction, ...]
    front: tuple[Prediction, ...]
    considered: int
    fitting: int


def search(predictor: Predictor, allowed: Allowed | None = None, *, keep: int = 20) -> Found:
    """The `keep` fastest plans that fit, and the Pareto front of time and memory.

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
        raise LayoutError(_nothing_fits(predictor, allowed, considered))
    best = heapq.nsmallest(keep, priced, key=lambda entry: entry[0])
    return Found(
        best=tuple(predictor.predict(plan) for _, _, plan in best),
        front=tuple(predictor.predict(plan) for plan in _front(priced)),
        considered=considered,
        fitting=len(priced),
    )


def _useful(allowed: Allowed, predictor: Predictor) -> Allowed:
    """Flash attention recomputes its scores by itself: selective recomputation would be the same plan twice."""
    if not predictor.stack.flash_attention:
        return allowed
    return replace(allowed, recompute=tuple(kind for kind in allowed.recompute if kind != "selective") or ("none",))


def fitting_memory(predictor: Predictor, plan: Plan) -> float | None:
    """Bytes of the fullest rank; None where they are more than the device has."""
    limit, peak = predictor.cluster.device.memory_bytes, 0.0
    for rank in sorted({0, min(1, plan.layout.pipeline - 1), plan.layout.pipeline - 1}):
        peak = max(peak, predictor.footprint(plan, rank).total)
        if peak > limit:
            return None
    return peak


def _front(priced: Iterable[tuple[float, float, Plan]]) -> list[Plan]:
    """Fastest first; each next one is slower and needs less memory."""
    front, least = [], float("inf")
    for _, memory, plan in sorted(priced, key=lambda entry: (entry[0], entry[1])):
        if memory < least:
            front.append(plan)
            least = memory
    return front


def _nothing_fits(predictor: Predictor, allowed: Allowed, considered: int) -> str:
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
        f"{have / 2**30:.1f}: "
        f"{_smallest_cluster(predictor, allowed)}"
    )


def _peak(predictor: Predictor, plan: Plan) -> Footprint:
    return max(predictor.footprints(plan), key=lambda one: one.total)


def _smallest_cluster(predictor: Predictor, allowed: Allowed) -> str:
    """The smallest power-of-two multiple of this cluster on which a plan fits."""
    nodes = predictor.cluster.nodes
    for factor in (2, 4, 8, 16, 32, 64):
        larger = Predictor(
            predictor.workload,
            predictor.cluster.with_nodes(nodes * factor),
            stack=predictor.stack,
            constants=predictor.constants,
            overheads=predictor.overheads,
        )
        if any(
            fitting_memory(larger, plan) is not None for plan in candidates(larger.workload, larger.cluster, allowed)
        ):
            return f"{nodes * factor} nodes of it would do"
    return "no cluster of up to 64 times its nodes would do either; use devices with more memory"
