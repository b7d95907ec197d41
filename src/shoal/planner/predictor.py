"""Seconds and bytes of one step of a model under a plan, on a cluster. Closed forms only; every term is in the bill.

    step = m x (fullest rank's forward + backward of a microbatch) + bubble + gradients + optimizer

A microbatch on the fullest rank is its layers by the roofline (cost.operators), what the host needs to launch them
where that is longer, collectives that nothing hides, and head and loss, which the last rank has.

A predictor keeps what it computed of a layer, which thousands of plans share; it holds no other state.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.flops import model_flops
from shoal.cost.footprint import Footprint, Overheads, footprint
from shoal.cost.plan import Plan
from shoal.cost.roofline import Rates
from shoal.cost.transformer import Transformer
from shoal.cost.wire import Group, group_of
from shoal.planner.bill import Bill
from shoal.planner.constants import Constants
from shoal.planner.layer import LayerBill, LayerKey, layer_bill, share_of
from shoal.planner.stack import Stack
from shoal.planner.step import step_bill
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
    ) -> None:
        self.workload, self.cluster, self.stack = workload, cluster, stack
        self.constants = constants or Constants()
        self.overheads = overheads or Overheads()
        device, c = cluster.device, self.constants
        self.rates = Rates(
            matmul_flops_s=device.peak_flops_s(stack.dtype) * device.matmul_efficiency * c.compute,
            memory_bytes_s=device.memory_bytes_s * c.memory_efficiency,
            units=device.units,
            tile=device.tile,
            kernel_s=c.kernel_s,
            flash_share=c.flash_share,
        )
        self._layers: dict[LayerKey, LayerBill] = {}
        self._groups: dict[tuple[int, int, int], Group] = {}

    def bill(self, plan: Plan) -> Bill:
        """The seconds of a step."""
        return step_bill(plan, self.layer(plan), self)

    def group(self, plan: Plan, ranks: int, *, stride: int) -> Group:
        """The group of `ranks` ranks that lie `stride` apart, and its links."""
        key = (ranks, stride, plan.world_size)
        if key not in self._groups:
            self._groups[key] = group_of(self.cluster, ranks, stride=stride, world=plan.world_size)
        return self._groups[key]

    def layer(self, plan: Plan) -> LayerBill:
        """One layer and the head of one microbatch; plans that differ elsewhere share it."""
        key = LayerKey(share_of(self.workload.sequence, plan, self.stack), plan.recompute, plan.world_size)
        if key not in self._layers:
            self._layers[key] = layer_bill(self.workload.model, plan, key.share, self)
        return self._layers[key]

    def footprints(self, plan: Plan) -> tuple[Footprint, ...]:
        """Memory of the first and the last pipeline rank: no other holds more."""
        ranks = sorted({0, min(1, plan.layout.pipeline - 1), plan.layout.pipeline - 1})
        return tuple(self.footprint(plan, rank) for rank in ranks)

    def footprint(self, plan: Plan, rank: int) -> Footprint:
        """Memory of one pipeline rank."""
        return footprint(
            self.workload.model,
            plan,
            rank=rank,
            sequence=self.workload.sequence,
            state=self.stack.state,
            kept=self.stack.kept,
            overheads=self.overheads,
        )

    def predict(self, plan: Plan) -> Prediction:
        """Time and memory of `plan`, which need not fit."""
        footprints = self.footprints(plan)
        peak = max(one.total for one in footprints)
        bill = self.bill(plan)
        step_s = bill.total
        work, workload = self.workload.model, self.workload
        flops = model_flops(work, workload.global_samples, workload.sequence)
        peak_flops = self.cluster.device.peak_flops_s(self.stack.dtype) * plan.world_size
        return Prediction(
            plan=plan,
            bill=bill,
            footprints=footprints,
            step_s=step_s,
            tokens_per_s=workload.tokens / step_s,
            mfu=flops / step_s / peak_flops,
            memory_bytes=peak,
            fits=peak <= self.cluster.device.memory_bytes,
        )
