"""Predictions for a model of which only its trace is known, in the place of closed forms.

    step = m x (fullest rank's traced operators, and its collectives) + bubble + gradients + optimizer

Operators cost what the roofline says, or, on a machine that was measured, what the nearest of its operators take.
Everything around the model (links, ZeRO, bubbles, the optimizer) has the prices of `planner.predict.predictor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from shoal.cost.bubble import bubble_s
from shoal.cost.footprint import Footprint, Overheads
from shoal.cost.plan import Plan
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
from shoal.planner.trace.footprint import traced_footprint
from shoal.planner.trace.subject import Stages, TracedJob, TracedSplit, placement_of
from shoal.planner.trace.trace import Trace
from shoal.planner.trace.unit_seconds import UnitSeconds, unit_seconds
from shoal.topology.cluster import Cluster

FEW_SAMPLES = 2
"""Of a trace whose size does not matter; batch norms refuse a single one."""


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
