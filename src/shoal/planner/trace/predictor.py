"""Predictions for a model of which only its trace is known, in the place of closed forms.

    step = m x (fullest rank's traced operators, and its collectives) + bubble + gradients + optimizer

Operators cost what the roofline says, or, on a machine that was measured, what the nearest of its operators take.
Everything around the model (links, ZeRO, bubbles, the optimizer) has the prices of `planner.predict.predictor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from shoal.cost.activations import bubble_s, in_flight
from shoal.cost.alpha_beta import Links
from shoal.cost.footprint import Footprint, Overheads, StateBytes
from shoal.cost.plan import Plan
from shoal.cost.prices import Heads, Prices
from shoal.cost.transformer import Recompute
from shoal.errors import ConfigError, LayoutError
from shoal.gradients.bucket import IN_FLIGHT, Member, fill_buckets
from shoal.gradients.config import GradientsConfig
from shoal.planner.predict.layer import LayerBill
from shoal.planner.predict.machine import tensor_group
from shoal.planner.predict.measured import Measured
from shoal.planner.predict.predictor import Predictor
from shoal.planner.predict.stack import Stack
from shoal.planner.predict.step import (
    coding_s,
    gathers,
    gradients,
    hosted,
    on_shared_cores,
    optimizer_s,
    transfer_s,
    transfers,
)
from shoal.planner.predict.workload import COMPUTED, Abilities, Bill, Constants, Stage, Workload
from shoal.planner.trace.operator import Message, Operator
from shoal.planner.trace.subject import Held, Stages, TracedJob, TracedSplit, placement_of
from shoal.planner.trace.trace import Trace
from shoal.topology.cluster import Cluster

# Seconds of a trace's operators on a device, unit by unit: by the roofline, or by measured operators (`cost.prices`).
#
# Products run at the rate of their shapes, fused attention at its own, everything else at the rate of memory. The
# device waits where the host takes longer to launch a phase's operators than the device to run them.


@dataclass(kw_only=True)
class UnitSeconds:
    """One unit of one microbatch; `items` as in a bill. `forward_s`, `input_s` (with what is computed again) and
    `weight_s` are the same seconds by phase."""

    items: dict[str, float]
    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.input_s + self.weight_s

    def add(self, item: str, seconds: float) -> None:
        """To one item of the bill."""
        self.items[item] = self.items.get(item, 0.0) + seconds


def operator_s(operator: Operator, prices: Prices) -> float:
    """Seconds of one operator on the device."""
    if operator.products:
        size = operator.outputs[0].element_bytes
        return sum(prices.product(product.matmul, element_bytes=size) for product in operator.products)
    if operator.attention_flops:
        samples, heads, tokens, features = operator.inputs[0].dims
        shape = Heads(samples * heads, tokens, features)
        return prices.fused_attention(operator.attention_flops, shape, backward=operator.phase == "backward")
    return prices.passed(operator.moved_bytes)


def unit_seconds(trace: Trace, prices: Prices, tensor: Links, *, dispatch_s: float) -> dict[int | None, UnitSeconds]:
    """Every unit that has operators; None: what lies outside of units. `tensor` links the ranks of the messages."""
    found: dict[int | None, UnitSeconds] = {}
    for unit in {one.unit for one in trace.operators}:
        operators = [one for one in trace.operators if one.unit == unit]
        found[unit] = _seconds(operators, prices, dispatch_s)
    for message in trace.messages:
        _say(found.setdefault(message.unit, UnitSeconds(items={})), message, tensor)
    return found


def _seconds(operators: Iterable[Operator], prices: Prices, dispatch_s: float) -> UnitSeconds:
    unit = UnitSeconds(items={})
    host = {"forward": 0.0, "backward": 0.0}
    for one in operators:
        seconds = operator_s(one, prices)
        unit.add(_item(one), seconds)
        host["forward" if one.phase == "forward" else "backward"] += dispatch_s
        weight = _weight_share(one) * seconds
        unit.weight_s += weight
        if one.phase == "forward":
            unit.forward_s += seconds
        else:
            unit.input_s += seconds - weight
    ahead = max(0.0, host["forward"] - unit.forward_s)
    behind = max(0.0, host["backward"] - unit.input_s - unit.weight_s)
    unit.add("launches", ahead + behind)
    unit.forward_s += ahead
    unit.input_s += behind
    return unit


def _item(operator: Operator) -> str:
    if operator.phase == "recompute":
        return "recomputation"
    if operator.products:
        return "matrix products"
    return "attention" if operator.attention_flops else "memory passes"


def _weight_share(operator: Operator) -> float:
    """How much of an operator's work gives a weight's gradient."""
    own = sum(product.matmul.flops for product in operator.products if product.gives == "weight")
    return own / operator.flops if own else 0.0


def _say(unit: UnitSeconds, message: Message, links: Links) -> None:
    """Tensor ranks wait for each collective."""
    seconds = links.all_reduce(message.size) if message.kind == "all_reduce" else links.all_gather(message.size)
    unit.add("tensor", seconds)
    if message.phase == "forward":
        unit.forward_s += seconds
    else:
        unit.input_s += seconds


# Bytes that one rank of a traced model needs at its peak, by what needs them.
#
#     weights, gradients, optimizer   parameters of the rank's units x StateBytes, divided by ZeRO
#     activations                     what lived from the forward to the backward x microbatches in flight
#     recomputed                      the most that a backward had beside it: recomputed blocks, gradients on their way
#     gathered, buckets               as cost.eager_memory counts them for this project's own blocks
#
# Without a pipeline the second and third are the trace's own peak, moment by moment. With one, the fullest backward of
# a unit stands beside all that is in flight, which is never too low.


BUCKETS_ON_THE_WAY = 3
"""Of ZeRO-2: two that travel and one that is filled."""
FEW_SAMPLES = 2
"""Of a trace whose size does not matter; batch norms refuse a single one."""
MOVING = 3
"""Activations that a stage sends, and receives ahead of their use."""


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


def _buckets(trace: Trace, *, by_unit: bool, bucket_bytes: float) -> list[list[str]]:
    """Parameters by the buckets in which ZeRO sends their gradients: of each block one, or as many as there is room
    for."""
    named = [(name, one) for name, one in trace.parameters.items() if one.trained]
    sizes, blocks = {one.name: one.bytes for one in trace.filled}, set(trace.units.blocks)
    members = [
        Member(index, one.numel, sizes.get(name, 0), min(blocks & {*one.units}, default=-1) if by_unit else None)
        for index, (name, one) in enumerate(named)
    ]
    most = int(sum(sizes.values()) + 1 if by_unit else bucket_bytes)
    first = most if by_unit else GradientsConfig().first_bucket_bytes
    found = fill_buckets(members, first_bytes=min(first, most), bytes_limit=most)
    used = ([named[member.index][0] for member in bucket if member.bytes] for bucket in found)
    return [bucket for bucket in used if bucket]


class TracedPredictor(Predictor):
    """Predicts plans of one traced model on one cluster with one stack."""

    simulates = False

    def __init__(
        self,
        job: TracedJob,
        cluster: Cluster,
        *,
        stack: Stack,
        constants: Constants | None = None,
        overheads: Overheads | None = None,
        measured: Measured | None = None,
    ) -> None:
        # Whatever of the base class reads the sizes of a transformer is overridden below.
        super().__init__(
            cast(Workload, job), cluster, stack=stack, constants=constants, overheads=overheads, measured=measured
        )
        self.job = job
        self._units: dict[tuple[TracedSplit, int], dict[int | None, UnitSeconds]] = {}
        self._stages: dict[tuple[int, ...], Stages] = {}

    @property
    def abilities(self) -> Abilities:
        """Stages need a chain, tensor ranks need roles, what is computed again needs blocks; no context ranks, and
        experts stay whole."""
        subject = self.job.subject
        axes = {"replicate", "shard"}
        axes |= {"pipeline"} if subject.units.is_chain else set()
        axes |= {"tensor"} if subject.has_roles else set()
        again = Abilities().recompute if subject.has_blocks else frozenset[Recompute](("none",))
        return Abilities(axes=frozenset(axes), recompute=again, sequence_parallel=subject.slices_sequences)

    def tensor_rule(self, ranks: int) -> str:
        """What the model itself said when it was split."""
        if not self.job.subject.has_roles:
            return "tensor needs the roles of parameters, which the model does not declare (parameter_roles())"
        return self.job.subject.refusal(ranks) or f"tensor must divide {self.cluster.devices} devices"

    @property
    def parameters(self) -> float:
        """Numbers of the whole model."""
        return float(sum(parameter.numel() for parameter in self.job.subject.model.parameters()))

    @property
    def step_flops(self) -> float:
        """Of a whole step, from the trace of a few samples."""
        return self._trace(TracedSplit(FEW_SAMPLES)).flops / FEW_SAMPLES * self.job.global_samples

    def trace(self, plan: Plan) -> Trace:
        """One microbatch of a rank of `plan`, as if it held all stages. Raises `LayoutError` for what has no price."""
        layout, units = plan.layout, self.job.subject.units
        for axis in ("context", "expert"):
            if getattr(layout, axis) > 1:
                raise LayoutError(
                    f"layout.{axis} = {getattr(layout, axis)}: traced models have no price for it; set it to 1"
                )
        if layout.pipeline > 1 and not units.is_chain:
            raise LayoutError(
                f"layout.pipeline = {layout.pipeline}: the model declares no chain to cut (parts()); set it to 1"
            )
        return self._trace(_split(plan))

    def stages(self, plan: Plan) -> Stages:
        """Which units each pipeline rank holds."""
        self.trace(plan)
        placement = placement_of(plan)
        if placement not in self._stages:
            self._stages[placement] = Stages.of(placement, self.job.subject.costs)
        return self._stages[placement]

    def stage(self, plan: Plan) -> Stage:
        """What of the fullest pipeline rank is sent and summed; the largest activation between blocks stands for all,
        and parameters that several units share for a tied embedding."""
        trace, shared = self.trace(plan), self._trace(TracedSplit(FEW_SAMPLES)).parameters.values()
        between = [trace.boundary_bytes[unit] for unit in trace.units.blocks] if plan.layout.pipeline > 1 else [0]
        held = max(self.stages(plan).held, key=lambda units: trace.numbers(units, trained=True))
        return Stage(
            layers=plan.stage_layers(self.job.model.layers),
            head=1.0,
            numbers=float(trace.numbers(held, trained=True)),
            tied_numbers=float(sum(one.numel for one in shared if len(one.units) > 1)),
            boundary_bytes=float(max(between)),
            matrices=tuple(trace.matrices(held)),
        )

    def layer(self, plan: Plan, *, at_work: int | None = None) -> LayerBill:
        """Traced units are not alike. Raises `ConfigError`."""
        raise ConfigError("a traced model has no layer that stands for all: only plans of gpt and moe are simulated")

    def backward_s(self, plan: Plan) -> float:
        """Seconds of the fullest rank's backward of one microbatch."""
        ranks = [self._rank(plan, units) for units in self.stages(plan).held]
        fullest = max(ranks, key=lambda one: one.total_s)
        return fullest.input_s + fullest.weight_s

    def kept_shares(self, plan: Plan) -> Sequence[float]:
        """What each block has, in order, of all that a rank keeps for its backward."""
        trace = self.trace(plan)
        return [trace.kept_bytes.get(block, 0) / max(1, trace.held_bytes) for block in trace.units.blocks]

    def backward_bytes(self, plan: Plan) -> float | None:
        """See `Predictor.backward_bytes`."""
        if plan.layout.pipeline > 1:
            return None
        trace = self.trace(plan)
        if plan.zero < 2 or plan.layout.shard == 1:
            return float(trace.first_peak_bytes)
        buckets = _buckets(trace, by_unit=plan.zero == 3, bucket_bytes=self.stack.codecs.bucket_bytes)
        return float(trace.lent_peak_bytes(buckets, in_flight=IN_FLIGHT))

    @property
    def parameter_shares(self) -> Sequence[float]:
        """What each block has, in order, of all parameters."""
        trace = self._trace(TracedSplit(FEW_SAMPLES))
        return [trace.numbers(frozenset({block})) / self.parameters for block in trace.units.blocks]

    def footprint(self, plan: Plan, rank: int) -> Footprint:
        """Memory of one pipeline rank."""
        found = traced_footprint(
            self.trace(plan),
            plan,
            self.stages(plan),
            rank=rank,
            state=self.stack.state,
            overheads=self.overheads,
        )
        return self.with_residuals(found, plan)

    def bill(self, plan: Plan) -> Bill:
        """The seconds of a step."""
        stage = self.stage(plan)
        ranks = [self._rank(plan, units) for units in self.stages(plan).held]
        fullest = max(ranks, key=lambda one: one.total_s)
        micro, transfer = dict(fullest.items), transfer_s(plan, stage, self.machine)
        computed = sum(micro.get(name, 0.0) for name in (*COMPUTED, "launches"))
        backward = fullest.input_s + fullest.weight_s
        each = {
            "transfers": transfers(plan, self.machine, transfer_s=transfer, computed_s=computed),
            "gathers": gathers(plan, stage, self.machine, beside_s=computed),
        }
        once = gradients(plan, stage, self.machine, beside_s=backward)
        bill = {name: plan.microbatches * seconds for name, seconds in micro.items()}
        bill |= {name: plan.microbatches * part.seen_s for name, part in each.items()}
        bill["overlap"] = plan.microbatches * sum(part.slowed_s for part in each.values())
        bill |= hosted(bill, plan, stage, self.machine)
        bill["bubble"] = _bubble(plan, ranks, plan.virtual_stages * transfer)
        beyond_mean_s = plan.microbatches * (fullest.total_s - sum(one.total_s for one in ranks) / len(ranks))
        bill = on_shared_cores(bill, plan, self.machine, beyond_mean_s=beyond_mean_s)
        bill["gradients"] = once.seen_s
        bill["overlap"] += once.slowed_s
        bill["coding"] = coding_s(plan, stage, self.machine, beside_s=backward)
        bill = {name: self.stack.backwards * seconds for name, seconds in bill.items()}
        bill["optimizer"] = optimizer_s(plan, stage, self.machine)
        return Bill(bill)

    def _trace(self, split: TracedSplit) -> Trace:
        return self.job.subject.of(split)

    def _rank(self, plan: Plan, units: frozenset[int | None]) -> UnitSeconds:
        """All units of one pipeline rank, for one microbatch; what is no block is head and loss."""
        seconds, blocks = self._unit_seconds(plan), self.job.subject.units.blocks
        whole = UnitSeconds(items={})
        for unit in units & seconds.keys():
            one = seconds[unit]
            for item, value in one.items.items():
                inside = unit in blocks or not blocks or item not in COMPUTED
                whole.add(item if inside else "head and loss", value)
            whole.forward_s += one.forward_s
            whole.input_s += one.input_s
            whole.weight_s += one.weight_s
        return whole

    def _unit_seconds(self, plan: Plan) -> dict[int | None, UnitSeconds]:
        key = (_split(plan), plan.world_size)
        if key not in self._units:
            links = tensor_group(plan, self.machine)
            prices = self.machine.prices(plan.world_size)
            self._units[key] = unit_seconds(self.trace(plan), prices, links, dispatch_s=self.constants.dispatch_s)
        return self._units[key]


def _split(plan: Plan) -> TracedSplit:
    return TracedSplit(
        plan.microbatch,
        tensor=plan.layout.tensor,
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
        loss_chunks=plan.loss_chunks,
    )


def _bubble(plan: Plan, ranks: list[UnitSeconds], hops_s: float) -> float:
    """A rank waits for the others, which take as long as their mean."""
    count = len(ranks)
    return bubble_s(
        plan.schedule,
        pipeline=plan.layout.pipeline,
        virtual_stages=plan.virtual_stages,
        microbatches=plan.microbatches,
        forward_s=sum(one.forward_s for one in ranks) / count + hops_s,
        input_s=sum(one.input_s for one in ranks) / count + hops_s,
        weight_s=sum(one.weight_s for one in ranks) / count,
    )
