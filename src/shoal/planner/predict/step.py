"""A step from its layers: microbatches on the fullest pipeline rank, the bubble, gradients, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.cost.bubble import bubble_s
from shoal.cost.matmul import Matmul
from shoal.cost.plan import Plan
from shoal.cost.transformer import Transformer
from shoal.planner.predict.coding import (
    GradientSum,
    boundary_coding_s,
    chosen_codec,
    gradient_sum,
    number_bytes,
    pieces_coding_s,
)
from shoal.planner.predict.layer import LayerBill
from shoal.planner.predict.machine import Exposed, Machine, ends_group, exposed, shard_group, stage_group, world_group
from shoal.planner.predict.workload import COMPUTED, Bill, Stage

# What data parallelism adds to a step: gathered weights, sums of gradients, the optimizer's own share.


FLOAT8_BYTES = 1.0
CROSSINGS = 4
"""Of a stage and a microbatch: an activation and a gradient, each in and out."""
AGREEMENT_BYTES = 32.0
"""What ranks agree on in one small sum: a denominator, a loss, a norm."""


def gathers(plan: Plan, stage: Stage, machine: Machine, *, beside_s: float) -> Exposed:
    """Each microbatch: ZeRO-2 and -3 scatter gradients, or they would not be sharded; ZeRO-3 gathers weights twice.

    One collective a layer, so that the latency of a long ring counts as often as it does in FSDP. What belongs to no
    layer is gathered before the first one computes and scattered behind the last, so that nothing hides it.
    `beside_s` are the seconds in which the device computes and no other collective of this rank uses the links.
    """
    group = shard_group(plan, machine)
    if plan.zero < 2 or group.ranks == 1:
        return Exposed(seen_s=0.0, slowed_s=0.0)
    state, hides = machine.stack.state, beside_s if machine.stack.overlap_data else 0.0
    pieces = machine.stack.codecs.pieces
    coded, weights = pieces.codec("gradients"), pieces.codec("weights")
    weight_bytes = FLOAT8_BYTES if machine.stack.gathers_float8 else number_bytes(weights, state.activation)
    scatter = group.all_gather if coded is None else group.all_to_all
    term_bytes = number_bytes(coded, state.wire)
    numbers = (stage.numbers - stage.outside_numbers) / stage.layers if stage.layers else 0.0  # the head alone
    each = scatter(numbers * term_bytes)
    outside = scatter(stage.outside_numbers * term_bytes)
    if plan.zero == 3:
        each += 2 * group.all_gather(numbers * weight_bytes)
        outside += group.all_gather(stage.outside_numbers * number_bytes(weights, state.activation))
    hidden = exposed(stage.layers * each, hides, slowdown=machine.constants.overlap_slowdown)
    return Exposed(seen_s=hidden.seen_s + outside, slowed_s=hidden.slowed_s)


def gradients(plan: Plan, stage: Stage, machine: Machine, *, beside_s: float) -> Exposed:
    """Once a step: sums over shard x context (unless each microbatch did), then over replicas; new weights gathered.

    `beside_s` is the backward of the last microbatch, beside which sums may run; the gather of weights may not.
    """
    stack, group = machine.stack, shard_group(plan, machine)
    seconds = stage_sum(plan, stage, machine, beside_s=beside_s).wire_s
    after = group.all_gather(stage.numbers * stack.state.activation) if plan.zero in (1, 2) else 0.0
    hides = beside_s if sums_overlap(plan, machine) else 0.0
    seen = exposed(seconds, hides, slowdown=machine.constants.overlap_slowdown)
    agreed = stack.agreements * world_group(plan, machine).all_reduce(AGREEMENT_BYTES)
    return Exposed(seen_s=seen.seen_s + after + _tied_s(plan, stage, machine) + agreed, slowed_s=seen.slowed_s)


def sums_overlap(plan: Plan, machine: Machine) -> bool:
    """Whether sums of gradients run beside the backward."""
    stack = machine.stack
    return stack.overlap_data or (stack.overlap_network and world_group(plan, machine).spans_nodes)


def stage_sum(plan: Plan, stage: Stage, machine: Machine, *, beside_s: float) -> GradientSum:
    """The sum of all gradients of the fullest rank, by the program's codec."""
    codec = chosen_codec(plan, machine, numbers=stage.numbers, matrices=stage.matrices, beside_s=beside_s)
    return gradient_sum(plan, machine, codec, numbers=stage.numbers, matrices=stage.matrices)


def coding_s(plan: Plan, stage: Stage, machine: Machine, *, beside_s: float) -> float:
    """What a step's codecs take of the device: of sums, of ZeRO's pieces, of what travels between stages."""
    seconds = stage_sum(plan, stage, machine, beside_s=beside_s).coding_s
    seconds += pieces_coding_s(plan, machine, numbers=stage.numbers) * (1 if plan.zero == 1 else plan.microbatches)
    if plan.layout.pipeline > 1:
        numbers = stage.boundary_bytes / machine.stack.state.stream
        each = boundary_coding_s(machine, numbers=numbers, world=plan.world_size)
        seconds += CROSSINGS * plan.virtual_stages * plan.microbatches * each
    return seconds


PRODUCT = Matmul(1024, 1024, 1024)
"""Whose rate those of optimizers of matrices have."""


def optimizer_s(plan: Plan, stage: Stage, machine: Machine) -> float:
    """Passes over the state of the parameters that this rank updates, beside them its way there and back; and products
    of whole matrices, which the ranks that hold them divide among themselves.
    """
    share = plan.state_ranks if plan.zero else 1
    numbers, prices = stage.numbers / share, machine.prices(plan.world_size)
    passes = prices.update(numbers, update_bytes=machine.stack.update_bytes)
    flops = machine.stack.update_flops * stage.numbers / (plan.layout.replicate * plan.state_ranks)
    products = flops / PRODUCT.flops * prices.product(PRODUCT, element_bytes=machine.stack.state.weight)
    return max(passes, _moves_s(numbers, machine)) + products + machine.constants.optimizer_start_s


def _moves_s(numbers: float, machine: Machine) -> float:
    """Of the state of so many parameters that lives elsewhere: over the link to the host in both directions at once,
    to and from the disk of a node one after the other. On cores a move is a pass over memory, of `update_bytes`.
    """
    stack, cluster = machine.stack, machine.cluster
    state_bytes = numbers * stack.state.optimizer
    if stack.state_home == "device":
        return 0.0
    if stack.state_home == "disk":
        return 2 * state_bytes * cluster.machine.devices / (cluster.reliability.storage_gb_s * 1e9)
    return state_bytes / (cluster.reliability.staging_gb_s * 1e9)


def _tied_s(plan: Plan, stage: Stage, machine: Machine) -> float:
    """First and last stage sum the gradient of a tied embedding."""
    if not stage.tied_numbers or plan.layout.pipeline == 1:
        return 0.0
    size = stage.tied_numbers / plan.layout.tensor * machine.stack.state.wire
    return ends_group(plan, machine).all_reduce(size)


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
    bill = {name: machine.stack.backwards * seconds for name, seconds in bill.items()}
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
