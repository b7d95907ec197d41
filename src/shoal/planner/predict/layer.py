"""One layer, and the head, of one microbatch on one rank: device seconds, launches, collectives inside the layer."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.alpha_beta import Links
from shoal.cost.operators import LayerSeconds, Share
from shoal.cost.plan import Plan
from shoal.cost.prices import Prices
from shoal.cost.transformer import Recompute, Transformer
from shoal.planner.predict.machine import Exposed, Machine, context_group, expert_group, exposed, tensor_group
from shoal.planner.predict.measured import ContextKind, exchange
from shoal.planner.predict.stack import Stack

LOSS_TWICE = 1.5
"""The passes of a loss whose forward runs twice, of those of one that runs once: forward and backward make as many."""


@dataclass(frozen=True)
class LayerKey:
    """What a layer's seconds depend on, beside the machine's own constants."""

    share: Share
    recompute: Recompute
    recompute_share: float
    loss_chunks: int
    world: int
    at_work: int


def share_of(sequence: int, plan: Plan, stack: Stack) -> Share:
    """One rank's part of a layer under `plan`."""
    layout = plan.layout
    return Share(
        samples=plan.microbatch,
        sequence=sequence,
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
        sequence_parallel=plan.sequence_parallel,
        element_bytes=stack.state.activation,
        stream_bytes=stack.state.stream,
        eager=stack.eager,
        dropout=stack.dropout,
        flash_attention=stack.flash_attention,
        fused_weight_gradient=stack.fused_weight_gradient,
        fused_loss=stack.fused_loss,
        ring=stack.context == "ring" and layout.context > 1,
        float8=stack.float8,
        float8_casts=stack.float8_casts,
        whole_loss=stack.whole_loss,
    )


@dataclass(frozen=True, kw_only=True)
class LayerBill:
    """Seconds of one layer by item, and by phase: forward, input gradient (with recomputation), weight gradient.

    `head` are the items of head, loss and embedding, once a microbatch.
    """

    items: dict[str, float]
    forward_s: float
    input_s: float
    weight_s: float
    head: dict[str, float]


def layer_bill(model: Transformer, plan: Plan, *, share: Share, machine: Machine, at_work: int) -> LayerBill:
    """Everything that plans with the same share of a layer have in common.

    The host runs ahead while the device computes and while it waits for communication that runs beside computation; a
    blocking collective between tensor ranks lets the queue run dry, so that its seconds and the host's add up.
    """
    prices = machine.prices(at_work)
    device = prices.layer(model, share)
    wires = _wires(model, plan, share, machine, device)
    recompute_s, repeated_launches = _recomputed(plan, device, machine)
    c = machine.constants
    forward_launch = max(0.0, c.forward_operators * c.dispatch_s - device.forward - wires.context / 3)
    backward_host = (c.backward_operators + repeated_launches) * c.dispatch_s
    beside = wires.context * 2 / 3 + (wires.tensor_backward if machine.stack.overlap_tensor else 0.0)
    backward_launch = max(0.0, backward_host - device.backward - recompute_s - beside)
    again = _sent_again(plan, wires, machine)
    items = {
        "matrix products": device.matmul_forward + device.matmul_input + device.matmul_weight,
        "attention": device.attention_forward + device.attention_backward,
        "memory passes": device.passes_forward + device.passes_backward,
        "recomputation": recompute_s + again,
        "launches": forward_launch + backward_launch,
        "tensor": wires.tensor_forward + wires.tensor_backward,
        "context": wires.context,
        "expert": wires.expert,
        "overlap": wires.slowed,
    }
    forward = device.forward + forward_launch + wires.tensor_forward + wires.context / 3 + wires.expert / 2
    weight = device.matmul_weight
    return LayerBill(
        items=items,
        forward_s=forward,
        input_s=sum(items.values()) - forward - weight,
        weight_s=weight,
        head=_head(model, plan, share, machine, prices),
    )


@dataclass(frozen=True, kw_only=True)
class _Wires:
    tensor_forward: float
    tensor_backward: float
    context: float
    expert: float
    slowed: float


def _wires(model: Transformer, plan: Plan, share: Share, machine: Machine, device: LayerSeconds) -> _Wires:
    """Collectives of one layer, what is hidden taken off."""
    slowdown = machine.constants.overlap_slowdown
    stream = share.tokens * model.hidden * share.element_bytes
    group = tensor_group(plan, machine)
    crossed = _crossings(model, group, stream, plan, gathers_each=machine.stack.gathers_each)
    if group.ranks > 1:
        copies = 2 * machine.stack.crossing_copies * (2 if plan.sequence_parallel else 1)
        crossed += copies * machine.prices(plan.world_size).copy(
            share.tokens, model.hidden, element_bytes=share.element_bytes
        )
    beside = device.matmul_weight if machine.stack.overlap_tensor else 0.0
    backward = exposed(crossed, beside, slowdown=slowdown)
    again = _gathered_again(plan, machine, stream, device)
    keys = 2 * model.kv_width * share.samples * share.sequence * share.element_bytes / share.tensor
    axis = context_group(plan, machine)
    if machine.stack.context is None:
        beside_s = device.attention_forward + device.attention_backward
        context = exposed(3 * axis.all_gather(keys), beside_s, slowdown=slowdown)
    else:
        context = _seen_context(machine.stack.context, axis, plan, share, model, machine)
    routed = share.routed_tokens * model.hidden * share.element_bytes * model.experts_per_token
    mixed = 1 - model.dense_layers / model.layers
    fullest = model.fullest_rank(share.expert) * routed
    trip = mixed * expert_group(plan, machine).all_to_all(fullest) if model.experts else 0.0
    return _Wires(
        tensor_forward=crossed,
        tensor_backward=backward.seen_s + again.seen_s,
        context=context.seen_s,
        expert=4 * trip,
        slowed=backward.slowed_s + again.slowed_s + context.slowed_s,
    )


def _seen_context(
    kind: ContextKind, axis: Links, plan: Plan, share: Share, model: Transformer, machine: Machine
) -> Exposed:
    """Nothing hides what CPU ranks say to each other."""
    width = share.tokens * share.element_bytes / share.tensor
    both = exchange(
        kind,
        axis,
        query_bytes=width * model.attention_width,
        key_bytes=2 * width * model.kv_width,
        copy_bytes_s=machine.prices(plan.world_size).memory_bytes_s,
    )
    return Exposed(seen_s=both.forward_s + both.backward_s, slowed_s=0.0)


def _crossings(model: Transformer, group: Links, stream: float, plan: Plan, *, gathers_each: bool) -> float:
    """Between tensor ranks in one direction: an all-reduce behind attention and feed-forward each, or, under sequence
    parallelism, the all-gathers before their column layers and a reduce-scatter behind each of the two."""
    if not plan.sequence_parallel:
        return 2 * group.all_reduce(stream)
    columns = 3 + model.feed_forward_matrices - 1
    return ((columns if gathers_each else 2) + 2) * group.all_gather(stream)


def _gathered_again(plan: Plan, machine: Machine, stream: float, device: LayerSeconds) -> Exposed:
    """Sequence parallelism that keeps only its share of an input gathers it again for the weight's gradient, beside the
    product that gives the input's (arXiv:2205.05198, section 4.2.2); a stack without overlap keeps it whole instead."""
    if not (plan.sequence_parallel and machine.stack.overlap_tensor):
        return Exposed(seen_s=0.0, slowed_s=0.0)
    seconds = 2 * tensor_group(plan, machine).all_gather(stream)
    return exposed(seconds, device.matmul_input, slowdown=machine.constants.overlap_slowdown)


def _sent_again(plan: Plan, wires: _Wires, machine: Machine) -> float:
    """Seconds of the forward's collectives that recomputation repeats; what follows the last product is left out where
    it stops early."""
    if plan.recompute not in ("operators", "full"):
        return 0.0
    whole = wires.tensor_forward + wires.expert / 2
    return plan.recompute_share * whole / (2 if machine.stack.stops_early else 1)


def _recomputed(plan: Plan, device: LayerSeconds, machine: Machine) -> tuple[float, float]:
    """(device seconds, operators) of what the backward does again, the mean over all layers.

    Flash attention recomputes by itself.
    """
    share, operators = plan.recompute_share, machine.constants.forward_operators
    if plan.recompute == "full":
        last = device.last_product if machine.stack.stops_early else 0.0
        return share * (device.forward - last), share * operators
    if plan.recompute == "operators":
        return share * (device.matmul_forward / 2 + device.passes_forward), share * operators
    if plan.recompute == "selective" and not machine.stack.flash_attention:
        return device.attention_forward, 4.0
    return 0.0, 0.0


def _head(model: Transformer, plan: Plan, share: Share, machine: Machine, prices: Prices) -> dict[str, float]:
    """Head, loss and embedding of a microbatch. The loss sums three numbers a token over tensor ranks, or they gather
    the logits. With chunks of the loss it runs chunk by chunk; where ranks split the head or pass microbatches on, its
    forward and a third of the products run twice."""
    products, loss, embedding = prices.head(model, share)
    group = tensor_group(plan, machine)
    stream = share.tokens * model.hidden * share.element_bytes
    wires = 2 * group.all_reduce(stream)
    if share.whole_loss:
        lost = group.all_gather(share.tokens * model.vocabulary * share.element_bytes)
    else:
        lost = 3 * group.all_reduce(4.0 * share.tokens)
    host = machine.constants.head_operators * machine.constants.dispatch_s
    host *= plan.loss_chunks
    if plan.loss_chunks > 1 and plan.layout.pipeline * plan.layout.tensor > 1:
        products, loss, lost, host = products * 4 / 3, loss * LOSS_TWICE, 2 * lost, host * LOSS_TWICE
    return {"head and loss": products + loss + embedding, "tensor": wires + lost, "launches": host}
