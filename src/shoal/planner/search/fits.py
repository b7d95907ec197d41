"""Does a plan fit? And where none does: what binds, and the smallest cluster that would do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.cost.footprint import Footprint
from shoal.cost.plan import Plan
from shoal.planner.predict.predictor import Predictor
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
