"""Seconds and bytes of one step of a model under a plan, on a cluster. Closed forms only; every term is in the bill.

    step = m x (fullest rank's forward + backward of a microbatch) + bubble + gradients + optimizer

A microbatch on the fullest rank is its layers by the roofline (cost.operators), what the host needs to launch them
where that is longer, collectives that nothing hides, and head and loss, which the last rank has.

On a machine that was measured, operators have their measured prices in the place of the roofline's, and ranks share
its cores (`planner.predict.measured`).

A predictor keeps what it computed of a layer, which thousands of plans share; it holds no other state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from shoal.codec.config import NoCodec
from shoal.codec.costs import Matrices
from shoal.cost.activations import boundary_bytes, layer_activation_bytes
from shoal.cost.eager_footprint import eager_block_bytes, eager_footprint
from shoal.cost.footprint import Footprint, Overheads, footprint, stage_parameters
from shoal.cost.plan import V_SHAPED, Plan
from shoal.cost.transformer import embedding_parameters, head_parameters, matrix_shapes, model_flops, total_parameters
from shoal.planner.predict.coding import GradientSum, residual_bytes
from shoal.planner.predict.layer import LayerBill, LayerKey, layer_bill, share_of
from shoal.planner.predict.machine import Machine
from shoal.planner.predict.measured import Measured
from shoal.planner.predict.stack import Stack
from shoal.planner.predict.step import stage_sum, step_bill
from shoal.planner.predict.workload import Abilities, Bill, Constants, Stage, Workload, balanced_layers
from shoal.topology.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan costs. `footprints` are those of the first and the last pipeline rank."""

    plan: Plan
    bill: Bill
    footprints: tuple[Footprint, ...]
    step_s: float
    tokens_per_s: float
    mfu: float
    memory_bytes: float
    fits: bool

    @property
    def peak(self) -> Footprint:
        """The fullest rank's memory."""
        return max(self.footprints, key=lambda one: one.total)

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON: the plan, seconds and bytes by item, and what follows from them."""
        plan = self.plan
        return {
            "plan": plan.describe(),
            "layout": plan.layout.to_dict(),
            "microbatch": plan.microbatch,
            "microbatches": plan.microbatches,
            "schedule": plan.schedule,
            "stages_per_rank": plan.virtual_stages,
            "zero": plan.zero,
            "recompute": plan.recompute,
            "loss_chunks": plan.loss_chunks,
            "sequence_parallel": plan.sequence_parallel,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "bill_s": dict(self.bill.seconds),
            "memory": self.peak.items(),
        }


class Predictor:
    """Predicts plans of one workload on one cluster with one stack."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        stack: Stack,
        constants: Constants | None = None,
        overheads: Overheads | None = None,
        measured: Measured | None = None,
    ) -> None:
        self.workload, self.cluster, self.stack, self.measured = workload, cluster, stack, measured
        self.overheads = overheads or Overheads()
        self.machine = Machine(cluster, stack=stack, constants=constants, measured=measured)
        self.constants = self.machine.constants
        self._layers: dict[LayerKey, LayerBill] = {}

    def bill(self, plan: Plan) -> Bill:
        """The seconds of a step."""
        return step_bill(plan, self.stage(plan), self.layer(plan), model=self.workload.model, machine=self.machine)

    def on(
        self,
        cluster: Cluster,
        *,
        measured: Measured | None = None,
        constants: Constants | None = None,
        stack: Stack | None = None,
    ) -> Self:
        """The same on another cluster, of which `measured` was measured; `constants`, `stack`: others than before."""
        return type(self)(
            self.workload,
            cluster,
            stack=stack or self.stack,
            constants=constants or self.constants,
            overheads=self.overheads,
            measured=measured,
        )

    def layer(self, plan: Plan, *, at_work: int | None = None) -> LayerBill:
        """One layer and the head of one microbatch, with `at_work` ranks at once (default: all); plans that differ
        elsewhere share it."""
        ranks = at_work or plan.world_size
        share = share_of(self.workload.sequence, plan, self.stack)
        key = LayerKey(share, plan.recompute, plan.recompute_share, plan.loss_chunks, plan.world_size, ranks)
        if key not in self._layers:
            self._layers[key] = layer_bill(
                self.workload.model, plan, share=key.share, machine=self.machine, at_work=ranks
            )
        return self._layers[key]

    def backward_s(self, plan: Plan) -> float:
        """Seconds of the fullest rank's backward of one microbatch."""
        layer = self.layer(plan)
        return self.stage(plan).layers * (layer.input_s + layer.weight_s)

    def gradient_sum(self, plan: Plan) -> GradientSum:
        """The sum of the fullest rank's gradients over replicas."""
        return stage_sum(plan, self.stage(plan), self.machine, beside_s=self.backward_s(plan))

    def footprints(self, plan: Plan) -> tuple[Footprint, ...]:
        """Memory of the first and the last pipeline rank: no other holds more."""
        ranks = sorted({0, min(1, plan.layout.pipeline - 1), plan.layout.pipeline - 1})
        return tuple(self.footprint(plan, rank) for rank in ranks)

    @property
    def _eager(self) -> bool:
        """Whether the closed forms are those of this project's own dense blocks."""
        return self.stack.own_blocks and not self.workload.model.experts

    def block_bytes(self, plan: Plan) -> float:
        """What one layer keeps of one microbatch for its backward."""
        model, sequence, kept = self.workload.model, self.workload.sequence, self.stack.kept
        if self._eager:
            return eager_block_bytes(model, plan, sequence=sequence, kept=kept)
        return layer_activation_bytes(
            model,
            plan.microbatch * sequence / plan.layout.context,
            sequence,
            tensor=plan.layout.tensor,
            sequence_parallel=plan.sequence_parallel,
            recompute=plan.recompute,
            kept=kept,
            expert=plan.layout.expert,
        )

    def kept_shares(self, plan: Plan) -> Sequence[float]:
        """What each block has, in order, of all that a rank keeps for its backward."""
        layers = max(1, math.ceil(self.workload.model.layers))
        return [1 / layers] * layers

    def backward_bytes(self, plan: Plan) -> float | None:
        """The most of activations and of gradients on their way: those that ZeRO-2 and -3 send, or that a first
        backward on one rank makes; None: not known.
        """
        return None

    @property
    def parameter_shares(self) -> Sequence[float]:
        """What each block has, in order, of all parameters."""
        model = self.workload.model
        inside = 1 - (embedding_parameters(model) + head_parameters(model)) / total_parameters(model)
        layers = max(1, math.ceil(model.layers))
        return [inside / layers] * layers

    def footprint(self, plan: Plan, rank: int) -> Footprint:
        """Memory of one pipeline rank."""
        found = (eager_footprint if self._eager else footprint)(
            self.workload.model,
            self._cut(plan),
            rank=rank,
            sequence=self.workload.sequence,
            state=self.stack.state,
            kept=self.stack.kept,
            overheads=self.overheads,
        )
        return self.with_residuals(found, plan)

    def with_residuals(self, found: Footprint, plan: Plan) -> Footprint:
        """What error feedback keeps of the fullest rank's gradients beside `found`."""
        if self.stack.codecs.gradients == NoCodec():
            return found
        stage = self.stage(plan)
        kept = residual_bytes(plan, self.machine, numbers=stage.numbers, matrices=stage.matrices)
        return replace(found, residuals=kept, slack=found.slack + self.overheads.slack_share * kept)

    simulates = True
    """Whether `planner.simulate` knows how to play plans of the model."""

    @property
    def parameters(self) -> float:
        """Numbers of the whole model."""
        return total_parameters(self.workload.model)

    @property
    def step_flops(self) -> float:
        """Of a whole step, nothing computed again: the numerator of MFU."""
        return model_flops(self.workload.model, self.workload.global_samples, self.workload.sequence)

    def stage(self, plan: Plan) -> Stage:
        """What of the fullest pipeline rank is sent and summed."""
        model, cut = self.workload.model, self._cut(plan)
        tokens = plan.microbatch * self.workload.sequence / plan.layout.context
        layers, head = self._fullest(cut)
        outside = embedding_parameters(model) + (head_parameters(model) if plan.layout.pipeline == 1 else 0)
        return Stage(
            layers=layers,
            head=head,
            numbers=sum(stage_parameters(model, cut, 0)),
            tied_numbers=embedding_parameters(model) if model.tied else 0.0,
            boundary_bytes=boundary_bytes(model, tokens, element_bytes=self.stack.state.stream),
            outside_numbers=outside / plan.layout.tensor,
            matrices=tuple(
                Matrices(*shape)
                for shape in matrix_shapes(model, layers=layers, embedding=True, head=plan.layout.pipeline == 1)
            ),
        )

    def _cut(self, plan: Plan) -> Plan:
        """The plan with its stages as the program cuts them."""
        if plan.layout.pipeline == 1 or not self.stack.balances_stages:
            return plan
        stages = plan.layout.pipeline * plan.virtual_stages
        if stages > self.workload.model.layers + 2:
            return plan
        return replace(plan, cut=balanced_layers(self.workload.model, stages))

    def _fullest(self, plan: Plan) -> tuple[float, float]:
        """(layers, 1 with the head or 0) of the pipeline rank that computes longest."""
        layers = self.workload.model.layers
        if not plan.cut:
            return plan.stage_layers(layers), 1.0
        bill, last = self.layer(plan), 0 if plan.schedule in V_SHAPED else plan.layout.pipeline - 1
        each, head = sum(bill.items.values()), sum(bill.head.values())
        ranks = ((plan.rank_layers(layers, rank), float(rank == last)) for rank in range(plan.layout.pipeline))
        return max(ranks, key=lambda one: one[0] * each + one[1] * head)

    def tensor_rule(self, ranks: int) -> str:
        """What decides whether `ranks` tensor ranks can share the model."""
        model = self.workload.model
        return (
            f"tensor must divide {model.heads} heads, {model.feed_forward} features and {self.cluster.devices} "
            f"devices, and fit {model.kv_heads} key-value heads"
        )

    @property
    def abilities(self) -> Abilities:
        """What the model can do of what a search may ask."""
        return Abilities()

    def predict(self, plan: Plan) -> Prediction:
        """Time and memory of `plan`, which need not fit."""
        footprints = self.footprints(plan)
        peak = max(one.total for one in footprints)
        bill = self.bill(plan)
        step_s = bill.total
        peak_flops = self.cluster.device.peak_flops_s(self.stack.dtype) * plan.world_size
        return Prediction(
            plan=plan,
            bill=bill,
            footprints=footprints,
            step_s=step_s,
            tokens_per_s=self.workload.tokens / step_s,
            mfu=self.step_flops / step_s / peak_flops,
            memory_bytes=peak,
            fits=peak <= self.cluster.device.memory_bytes,
        )
