"""Seconds and bytes of one step of a model under a plan, on a cluster. Closed forms only; every term is in the bill.

    step = m x (fullest rank's forward + backward of a microbatch) + bubble + gradients + optimizer

A microbatch on the fullest rank is its layers by the roofline (cost.operators), what the host needs to launch them
where that is longer, collectives that nothing hides, and head and loss, which the last rank has.

On a machine that was measured, operators have their measured prices in the place of the roofline's, and ranks share
its cores (`planner.measured`).

A predictor keeps what it computed of a layer, which thousands of plans share; it holds no other state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.cost.activations import boundary_bytes, layer_activation_bytes
from shoal.cost.eager_memory import eager_block_bytes, eager_footprint
from shoal.cost.flops import model_flops
from shoal.cost.footprint import Footprint, Overheads, footprint, stage_parameters
from shoal.cost.parameters import embedding_parameters, total_parameters
from shoal.cost.plan import Plan
from shoal.cost.prices import Prices, RooflinePrices
from shoal.cost.roofline import Rates
from shoal.cost.transformer import Transformer
from shoal.cost.wire import Links, group_of
from shoal.planner.bill import Bill
from shoal.planner.constants import Constants
from shoal.planner.layer import LayerBill, LayerKey, layer_bill, share_of
from shoal.planner.measured import Measured
from shoal.planner.stack import Stack
from shoal.planner.step import step_bill
from shoal.topology.cluster import Cluster

if TYPE_CHECKING:
    from shoal.planner.candidates import Allowed


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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the step that trains it."""

    model: Transformer
    global_samples: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_samples * self.sequence


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
        self.workload, self.cluster, self.stack = workload, cluster, stack
        self.constants = constants or Constants()
        self.overheads = overheads or Overheads()
        self.measured = measured
        device, c = cluster.device, self.constants
        self.rates = Rates(
            matmul_flops_s=device.peak_flops_s(stack.dtype) * device.matmul_efficiency * c.compute,
            memory_bytes_s=device.memory_bytes_s * c.memory_efficiency,
            units=device.units,
            tile=device.tile,
            kernel_s=c.kernel_s,
            flash_share=c.flash_share,
        )
        self._roofline = RooflinePrices(self.rates)
        self._layers: dict[LayerKey, LayerBill] = {}
        self._groups: dict[tuple[int, int, int], Links] = {}

    def bill(self, plan: Plan) -> Bill:
        """The seconds of a step."""
        return step_bill(plan, self.layer(plan), self)

    def on(self, cluster: Cluster, *, measured: Measured | None = None) -> Predictor:
        """The same on another cluster; `measured`: what was measured of it."""
        return Predictor(
            self.workload,
            cluster,
            stack=self.stack,
            constants=self.constants,
            overheads=self.overheads,
            measured=measured,
        )

    def group(self, plan: Plan, ranks: int, *, stride: int) -> Links:
        """The group of `ranks` ranks that lie `stride` apart, and its links."""
        key = (ranks, stride, plan.world_size)
        if key not in self._groups:
            self._groups[key] = self._linked(plan, ranks, stride)
        return self._groups[key]

    def prices(self, ranks: int) -> Prices:
        """What operators cost while `ranks` ranks are at work at once."""
        return self._roofline if self.measured is None else self.measured.prices(ranks)

    def layer(self, plan: Plan, *, at_work: int | None = None) -> LayerBill:
        """One layer and the head of one microbatch, with `at_work` ranks at once (default: all); plans that differ
        elsewhere share it."""
        ranks = at_work or plan.world_size
        key = LayerKey(share_of(self.workload.sequence, plan, self.stack), plan.recompute, plan.world_size, ranks)
        if key not in self._layers:
            self._layers[key] = layer_bill(self.workload.model, plan, key.share, self, at_work=ranks)
        return self._layers[key]

    def _linked(self, plan: Plan, ranks: int, stride: int) -> Links:
        if self.measured is not None:
            return self.measured.group(ranks, plan.world_size)
        return group_of(self.cluster, ranks, stride=stride, world=plan.world_size)

    def footprints(self, plan: Plan) -> tuple[Footprint, ...]:
        """Memory of the first and the last pipeline rank: no other holds more."""
        ranks = sorted({0, min(1, plan.layout.pipeline - 1), plan.layout.pipeline - 1})
        return tuple(self.footprint(plan, rank) for rank in ranks)

    @property
    def _eager(self) -> bool:
        """Whether the closed forms are those of this project's own dense blocks."""
        return self.stack.eager and not self.workload.model.experts

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
        )

    def footprint(self, plan: Plan, rank: int) -> Footprint:
        """Memory of one pipeline rank."""
        return (eager_footprint if self._eager else footprint)(
            self.workload.model,
            plan,
            rank=rank,
            sequence=self.workload.sequence,
            state=self.stack.state,
            kept=self.stack.kept,
            overheads=self.overheads,
        )

    simulates = True
    """Whether `planner.simulate` knows how to play plans of the model."""

    @property
    def parameters(self) -> float:
        """Numbers of the whole model."""
        return total_parameters(self.workload.model)

    @property
    def tied_numbers(self) -> float:
        """Numbers of an embedding that the head uses too; 0 where it has its own."""
        return embedding_parameters(self.workload.model) if self.workload.model.tied else 0.0

    @property
    def step_flops(self) -> float:
        """Of a whole step, nothing computed again: the numerator of MFU."""
        return model_flops(self.workload.model, self.workload.global_samples, self.workload.sequence)

    def stage_numbers(self, plan: Plan) -> float:
        """Parameters of the fullest pipeline rank before ZeRO, the first."""
        return sum(stage_parameters(self.workload.model, plan, 0))

    def boundary_bytes(self, plan: Plan) -> float:
        """One activation between stages, of a microbatch."""
        tokens = plan.microbatch * self.workload.sequence / plan.layout.context
        return boundary_bytes(self.workload.model, tokens, element_bytes=self.stack.state.stream)

    def tensor_rule(self, ranks: int) -> str:
        """What decides whether `ranks` tensor ranks can share the model."""
        model = self.workload.model
        return (
            f"tensor must divide {model.heads} heads, {model.feed_forward} features and {self.cluster.devices} "
            f"devices, and fit {model.kv_heads} key-value heads"
        )

    def narrowed(self, allowed: Allowed) -> Allowed:
        """What of `allowed` the model can do."""
        return allowed

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
