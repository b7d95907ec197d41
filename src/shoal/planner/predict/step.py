"""A step from its layers: microbatches on the fullest pipeline rank, the bubble, gradients, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.cost.activations import bubble_s
from shoal.cost.plan import Plan
from shoal.cost.transformer import Transformer
from shoal.planner.predict.bill import COMPUTED, Bill
from shoal.planner.predict.coding import number_bytes
from shoal.planner.predict.data_parallel import coding_s, gathers, gradients, optimizer_s
from shoal.planner.predict.layer import LayerBill
from shoal.planner.predict.machine import Exposed, Machine, exposed, stage_group
from shoal.planner.predict.workload import Stage


def step_bill(plan: Plan, stage: Stage, layer: LayerBill, *, model: Transformer, machine: Machine) -> Bill:
    """All items of a step, seconds: those of the fullest pipeline rank."""
    layers = stage.layers
    micro = {name: layers * seconds for name, seconds in layer.items.items()}
    for name, seconds in layer.head.items():
        micro[name] = micro.get(name, 0.0) + stage.head * seconds
    transfer = transfer_s(plan, stage, machine)
    computed = sum(micro.get(name, 0.0) for name in (*COMPUTED, "launches"))
    _add(micro, "transfers", transfers(plan, machine, transfer_s=transfer, computed_s=computed))
    _add(micro, "gathers", gathers(plan, stage, machine, beside_s=computed))
    bill = {name: plan.microbatches * seconds for name, seconds in micro.items()}
    bill |= hosted(bill, plan, stage, machine)
    bill["bubble"] = _bubble(plan, layer, layers, transfer)
    layer_s, head_s = sum(layer.items.values()), sum(layer.head.values())
    mean_s = (model.layers * layer_s + head_s) / plan.layout.pipeline
    beyond_s = plan.microbatches * max(0.0, layers * layer_s + stage.head * head_s - mean_s)
    bill = on_shared_cores(bill, plan, machine, beyond_mean_s=beyond_s)
    backward = layers * (layer.input_s + layer.weight_s)
    _add(bill, "gradients", gradients(plan, stage, machine, beside_s=backward))
    bill["coding"] = coding_s(plan, stage, machine, beside_s=backward)
    bill["optimizer"] = optimizer_s(plan, stage, machine)
    return Bill(bill)


def hosted(bill: Mapping[str, float], plan: Plan, stage: Stage, machine: Machine) -> dict[str, float]:
    """What a measured machine's host adds to launches, and what its ranks wait for each other; else nothing."""
    if machine.measured is None:
        return {}
    host_s = machine.measured.host_s(plan.world_size, microbatches=plan.microbatches, layers=stage.layers)
    launches = bill.get("launches", 0.0) + host_s
    computed_s = sum(bill.get(name, 0.0) for name in COMPUTED) + launches
    waiting_s = machine.measured.waiting_s(
        plan, layers=stage.layers, computed_s=computed_s, context=machine.stack.context
    )
    return {"launches": launches, "waiting": waiting_s}


def on_shared_cores(bill: dict[str, float], plan: Plan, machine: Machine, *, beyond_mean_s: float) -> dict[str, float]:
    """Two bounds of a pipeline whose ranks share cores, of which the larger holds: the work of all ranks over the
    cores, and the fullest rank's at the rate of a core of its own, with its bubble. Of other plans, the bill itself.

    While all work at once, a rank has cores / ranks of a core; so the first bound is the mean rank's bill at that rate.
    `beyond_mean_s` is what the fullest rank, whose bill it is, has more to do than the mean one.
    """
    measured = machine.measured
    if measured is None or plan.layout.pipeline == 1 or plan.world_size <= measured.cores:
        return bill
    busy_s = sum(bill.values()) - bill["bubble"]
    mean_s = busy_s - beyond_mean_s
    alone_s = (busy_s + bill["bubble"]) / measured.crowding(plan.world_size)
    shared = {name: seconds * mean_s / busy_s for name, seconds in bill.items() if name != "bubble"}
    return {**shared, "bubble": max(0.0, alone_s - mean_s)}


def _add(bill: dict[str, float], name: str, part: Exposed) -> None:
    bill[name] = part.seen_s
    bill["overlap"] = bill.get("overlap", 0.0) + part.slowed_s


def transfers(plan: Plan, machine: Machine, *, transfer_s: float, computed_s: float) -> Exposed:
    """Both directions of every boundary of a rank, for one microbatch."""
    seconds = 2 * plan.virtual_stages * transfer_s
    beside = computed_s if machine.stack.overlap_pipeline else 0.0
    return exposed(seconds, beside, slowdown=machine.constants.overlap_slowdown)


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


def transfer_s(plan: Plan, stage: Stage, machine: Machine) -> float:
    """One activation from a stage to the next."""
    layout, stack = plan.layout, machine.stack
    if layout.pipeline == 1:
        return 0.0
    size, hop = boundary_wire_bytes(stage, machine), stage_group(plan, machine)
    split = plan.sequence_parallel or (stack.scatter_pipeline and hop.spans_nodes)
    return hop.send(size / (layout.tensor if split else 1))


def boundary_wire_bytes(stage: Stage, machine: Machine) -> float:
    """One activation on the wire, coded where the program codes it."""
    plain = machine.stack.state.stream
    return stage.boundary_bytes / plain * number_bytes(machine.stack.codecs.stages, plain)
