"""A step from its layers: microbatches on the fullest pipeline rank, the bubble, gradients, the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cost.bubble import bubble_s
from shoal.cost.plan import Plan
from shoal.planner.bill import COMPUTED, Bill
from shoal.planner.data_parallel import gathers, gradients, optimizer_s
from shoal.planner.layer import Exposed, LayerBill, exposed

if TYPE_CHECKING:
    from shoal.planner.predictor import Predictor


def step_bill(plan: Plan, layer: LayerBill, predictor: Predictor) -> Bill:
    """All items of a step, seconds."""
    layers = plan.stage_layers(predictor.workload.model.layers)
    micro = {name: layers * seconds for name, seconds in layer.items.items()}
    for name, seconds in layer.head.items():
        micro[name] = micro.get(name, 0.0) + seconds
    transfer = transfer_s(plan, predictor)
    computed = sum(micro.get(name, 0.0) for name in (*COMPUTED, "launches"))
    _add(micro, "transfers", transfers(plan, predictor, transfer, computed))
    _add(micro, "gathers", gathers(plan, predictor, beside_s=computed))
    bill = {name: plan.microbatches * seconds for name, seconds in micro.items()}
    if predictor.measured is not None:
        host_s = predictor.measured.host_s(plan.world_size, microbatches=plan.microbatches, layers=layers)
        bill["launches"] = bill.get("launches", 0.0) + host_s
        computed_s = sum(bill.get(name, 0.0) for name in (*COMPUTED, "launches"))
        bill["waiting"] = predictor.measured.waiting_s(
            plan, layers=layers, computed_s=computed_s, context=predictor.stack.context
        )
    bill["bubble"] = _bubble(plan, layer, layers, transfer)
    if _crowded(plan, predictor):
        bill = _shared_cores(bill, plan, predictor)
    backward = layers * (layer.input_s + layer.weight_s)
    _add(bill, "gradients", gradients(plan, predictor, beside_s=backward))
    bill["optimizer"] = optimizer_s(plan, predictor)
    return Bill(bill)


def _crowded(plan: Plan, predictor: Predictor) -> bool:
    """Do the stages of a pipeline share cores?"""
    return predictor.measured is not None and plan.layout.pipeline > 1 and plan.world_size > predictor.measured.cores


def _shared_cores(bill: dict[str, float], plan: Plan, predictor: Predictor) -> dict[str, float]:
    """Two bounds of a pipeline whose ranks share cores, of which the larger holds: the work of all ranks over the
    cores, and the fullest rank's at the rate of a core of its own, with its bubble.

    While all work at once, a rank has cores / ranks of a core; so the first bound is the mean rank's bill at that rate.
    """
    assert predictor.measured is not None
    share = plan.world_size / predictor.measured.cores
    head_s = plan.microbatches * sum(predictor.layer(plan).head.values())
    busy_s = sum(bill.values()) - bill["bubble"]
    mean_s = busy_s - head_s * (1 - 1 / plan.layout.pipeline)
    alone_s = (busy_s + bill["bubble"]) / share
    shared = {name: seconds * mean_s / busy_s for name, seconds in bill.items() if name != "bubble"}
    return {**shared, "bubble": max(0.0, alone_s - mean_s)}


def _add(bill: dict[str, float], name: str, part: Exposed) -> None:
    bill[name] = part.seen_s
    bill["overlap"] = bill.get("overlap", 0.0) + part.slowed_s


def transfers(plan: Plan, predictor: Predictor, transfer_s: float, computed_s: float) -> Exposed:
    """Both directions of every boundary of a rank, for one microbatch."""
    seconds = 2 * plan.virtual_stages * transfer_s
    beside = computed_s if predictor.stack.overlap_pipeline else 0.0
    return exposed(seconds, beside, slowdown=predictor.constants.overlap_slowdown)


def _bubble(plan: Plan, layer: LayerBill, layers: float, transfer_s: float) -> float:
    """Each hop of the fill and the drain carries a transfer, which nothing can hide there."""
    hops = plan.virtual_stages * transfer_s
    return bubble_s(
        plan.schedule,
        pipeline=plan.layout.pipeline,
        virtual_stages=plan.virtual_stages,
        microbatches=plan.microbatches,
        forward_s=layers * layer.forward_s + hops,
        input_s=layers * layer.input_s + hops,
        weight_s=layers * layer.weight_s,
    )


def transfer_s(plan: Plan, predictor: Predictor) -> float:
    """One activation from a stage to the next."""
    layout, stack = plan.layout, predictor.stack
    if layout.pipeline == 1:
        return 0.0
    size = predictor.boundary_bytes(plan)
    stride = layout.shard * layout.context * layout.tensor
    hop = predictor.group(plan, layout.pipeline, stride=stride)
    split = plan.sequence_parallel or (stack.scatter_pipeline and hop.spans_nodes)
    return hop.send(size / (layout.tensor if split else 1))
