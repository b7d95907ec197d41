"""Bytes that one rank of a traced model needs at its peak, by what needs them.

    weights, gradients, optimizer   parameters of the rank's units x StateBytes, divided by ZeRO
    activations                     what lived from the forward to the backward x microbatches in flight
    recomputed                      the most that a backward had beside it: recomputed blocks, gradients on their way
    gathered, buckets               as `cost.eager_footprint` counts them for this project's own blocks

Without a pipeline the second and third are the trace's own peak, moment by moment. With one, the fullest backward of
a unit stands beside all that is in flight, which is never too low.
"""

from __future__ import annotations

from shoal.cost.activations import in_flight
from shoal.cost.eager_footprint import BUCKETS_ON_THE_WAY, MOVING
from shoal.cost.footprint import Footprint, Overheads, StateBytes
from shoal.cost.plan import Plan
from shoal.planner.trace.subject import Held, Stages
from shoal.planner.trace.trace import Trace


def traced_footprint(
    trace: Trace, plan: Plan, stages: Stages, *, rank: int, state: StateBytes, overheads: Overheads
) -> Footprint:
    """The peak of pipeline rank `rank` in a microbatch that is `trace`."""
    units = stages.held[rank]
    numbers, trained = trace.numbers(units), trace.numbers(units, trained=True)
    weight, gradient, optimizer = state.sharded(plan.zero, plan.layout.shard)
    kept, beside = _activations(trace, plan, units, rank)
    given = {
        "weights": numbers * weight,
        "gradients": trained * gradient,
        "optimizer": state.on_device(trained * optimizer),
        "activations": kept,
        "recomputed": beside,
        "logits": 0.0,
        "gathered": _gathered(trace, plan, units, state),
        "buckets": _beside_buckets(plan, trained * state.gradient, overheads.bucket_bytes),
    }
    return Footprint(**given, workspace=overheads.workspace_bytes, slack=overheads.slack_share * sum(given.values()))


def _activations(trace: Trace, plan: Plan, units: Held, rank: int) -> tuple[float, float]:
    """(kept from forward to backward, at most beside that) bytes."""
    pipeline = plan.layout.pipeline
    if pipeline == 1:
        return float(trace.held_bytes), float(trace.peak_bytes - trace.held_bytes)
    held = in_flight(
        plan.schedule, rank, pipeline=pipeline, virtual_stages=plan.virtual_stages, microbatches=plan.microbatches
    )
    kept = held * sum(trace.kept_bytes.get(unit, 0) for unit in units)
    boundary = max(trace.boundary_bytes[unit] for unit in trace.units.blocks)
    kept += (held * plan.virtual_stages + MOVING) * boundary
    return kept, float(max(trace.on_the_way_bytes.get(unit, 0) for unit in units))


def _gathered(trace: Trace, plan: Plan, units: Held, state: StateBytes) -> float:
    """ZeRO-3: what belongs to no block, the block in use, the one that is fetched ahead. A schedule lets all stay."""
    if plan.zero < 3 or plan.layout.shard == 1:
        return 0.0
    if plan.layout.pipeline > 1:
        return state.weight * trace.numbers(units)
    blocks = sorted((trace.numbers(frozenset({block})) for block in trace.units.blocks), reverse=True)
    rest = trace.numbers(units) - sum(blocks)
    return state.weight * (rest + sum(blocks[:2]))


def _beside_buckets(plan: Plan, gradient_bytes: float, bucket_bytes: float) -> float:
    """Whole gradients beside those that the state counts: behind a schedule all, else ZeRO-2's buckets."""
    if plan.layout.pipeline > 1:
        return gradient_bytes
    if plan.zero < 2 or plan.layout.shard == 1 or plan.microbatches == 1:
        return 0.0
    return min(gradient_bytes, BUCKETS_ON_THE_WAY * bucket_bytes)
