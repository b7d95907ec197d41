"""A step from its layers: microbatches on the fullest pipeline rank, the bubble, gradients, the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cost.activations import boundary_bytes
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
    transfer = _transfer_s(plan, predictor)
    computed = sum(micro.get(name, 0.0) for name in (*COMPUTED, "launches"))
    _add(micro, "transfers", _transfers(plan, predictor, transfer, computed))
    _add(micro, "gathers", gathers(plan, predictor, beside_s=computed))
    bill = {name: plan.microbatches * seconds for name, seconds in micro.items()}
    bill["bubble"] = _bubble(plan, layer, layers, transfer)
    backward = layers * (layer.input_s + layer.weight_s)
    _add(bill, "gradients", gradients(plan, predictor, beside_s=backward))
    bill["optimizer"] = optimizer_s(plan, predictor)
    return Bill(bill)


def _add(bill: dict[str, float], name: str, part: Exposed) -> None:
    bill[name] = part.seen_s
    bill["overlap"] = bill.get("overlap", 0.0) + part.slowed_s


def _transfers(plan: Plan, predictor: Predictor, transfer_s: float, computed_s: float) -> Exposed:
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


def _transfer_s(plan: Plan, predictor: Predictor) -> float:
    """One activation from a stage to the next."""
    layout, stack = plan.layout, predictor.stack
    if layout.pipeline == 1:
        return 0.0
    tokens = plan.microbatch * predictor.workload.sequence / layout.context
    size = boundary_bytes(predictor.workload.model, tokens, element_bytes=stack.state.stream)
    stride = layout.shard * layout.context * layout.tensor
    hop = predictor.group(plan, layout.pipeline, stride=stride)
    split = plan.sequence_parallel or (stack.scatter_pipeline and hop.spans_nodes)
    return hop.send(size / (layout.tensor if split else 1))
