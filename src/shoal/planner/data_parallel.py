"""What data parallelism adds to a step: gathered weights, sums of gradients, the optimizer's own share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cost.plan import Plan
from shoal.cost.wire import Links
from shoal.planner.layer import Exposed, exposed

if TYPE_CHECKING:
    from shoal.planner.predictor import Predictor

AGREEMENT_BYTES = 32.0
"""What ranks agree on in one small sum: a denominator, a loss, a norm."""


def gathers(plan: Plan, predictor: Predictor, *, beside_s: float) -> Exposed:
    """Each microbatch: ZeRO-2 and -3 scatter gradients, or they would not be sharded; ZeRO-3 gathers weights twice.

    One collective a layer, so that the latency of a long ring counts as often as it does in FSDP.
    `beside_s` are the seconds in which the device computes and no other collective of this rank uses the links.
    """
    group = shard_group(plan, predictor)
    if plan.zero < 2 or group.ranks == 1:
        return Exposed(seen_s=0.0, slowed_s=0.0)
    state = predictor.stack.state
    units = plan.stage_layers(predictor.workload.model.layers) + 1
    numbers = _numbers(plan, predictor) / units
    each = group.all_gather(numbers * state.wire)
    each += 2 * group.all_gather(numbers * state.activation) if plan.zero == 3 else 0.0
    hides = beside_s if predictor.stack.overlap_data else 0.0
    return exposed(units * each, hides, slowdown=predictor.constants.overlap_slowdown)


def gradients(plan: Plan, predictor: Predictor, *, beside_s: float) -> Exposed:
    """Once a step: sums over shard x context (unless each microbatch did), then over replicas; new weights gathered.

    `beside_s` is the backward of the last microbatch, beside which sums may run; the gather of weights may not.
    """
    state = predictor.stack.state
    numbers = _numbers(plan, predictor)
    group, replicas = shard_group(plan, predictor), _replicas(plan, predictor)
    size, after = numbers * state.wire, 0.0
    if plan.zero == 0:
        seconds = group.all_reduce(size) + replicas.all_reduce(size)
    else:
        seconds = group.all_gather(size) if plan.zero == 1 else 0.0
        seconds += replicas.all_reduce(size / group.ranks)
        after = group.all_gather(numbers * state.activation) if plan.zero < 3 else 0.0
    hides = beside_s if predictor.stack.overlap_data else 0.0
    seen = exposed(seconds, hides, slowdown=predictor.constants.overlap_slowdown)
    agreed = predictor.stack.agreements * predictor.group(plan, plan.world_size, stride=1).all_reduce(AGREEMENT_BYTES)
    return Exposed(seen_s=seen.seen_s + after + _tied_s(plan, predictor) + agreed, slowed_s=seen.slowed_s)


def optimizer_s(plan: Plan, predictor: Predictor) -> float:
    """Passes over the state of the parameters that this rank updates."""
    share = plan.state_ranks if plan.zero else 1
    numbers = _numbers(plan, predictor) / share
    passes = predictor.prices(plan.world_size).update(numbers, update_bytes=predictor.stack.update_bytes)
    return passes + predictor.constants.optimizer_start_s


def shard_group(plan: Plan, predictor: Predictor) -> Links:
    """Ranks that hold the same stage and see other tokens: shard x context."""
    layout = plan.layout
    return predictor.group(plan, plan.state_ranks, stride=layout.tensor)


def _replicas(plan: Plan, predictor: Predictor) -> Links:
    layout = plan.layout
    return predictor.group(plan, layout.replicate, stride=layout.pipeline * plan.state_ranks * layout.tensor)


def _numbers(plan: Plan, predictor: Predictor) -> float:
    """Parameters of the first stage, which is the fullest."""
    return predictor.stage_numbers(plan)


def _tied_s(plan: Plan, predictor: Predictor) -> float:
    """First and last stage sum the gradient of a tied embedding."""
    layout, numbers = plan.layout, predictor.tied_numbers
    if not numbers or layout.pipeline == 1:
        return 0.0
    stride = plan.state_ranks * layout.tensor * (layout.pipeline - 1)
    pair = predictor.group(plan, 2, stride=stride)
    return pair.all_reduce(numbers / layout.tensor * predictor.stack.state.wire)
