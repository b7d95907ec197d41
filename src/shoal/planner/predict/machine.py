"""A cluster and the program that runs on it: what operators and messages take there, whatever the model is."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.alpha_beta import Links, group_of
from shoal.cost.matmul import Rates
from shoal.cost.plan import Plan
from shoal.cost.prices import Prices, RooflinePrices
from shoal.planner.predict.measured import Measured
from shoal.planner.predict.stack import Stack
from shoal.planner.predict.workload import Constants
from shoal.topology.cluster import Cluster


class Machine:
    """Prices by the roofline, or as they were measured. It keeps the groups it has looked up, and no other state."""

    def __init__(
        self, cluster: Cluster, *, stack: Stack, constants: Constants | None = None, measured: Measured | None = None
    ) -> None:
        self.cluster, self.stack = cluster, stack
        self.constants, self.measured = constants or Constants(), measured
        device, c = cluster.device, self.constants
        best = device.matmul_efficiency * c.compute
        self.rates = Rates(
            matmul_flops_s=device.peak_flops_s(stack.dtype) * best,
            memory_bytes_s=device.memory_bytes_s * c.memory_efficiency,
            units=device.units,
            tile=device.tile,
            kernel_s=c.kernel_s,
            peak_flops_s=device.peak_flops_s(stack.dtype),
            architecture=device.architecture,
            attention=stack.attention,
            float8_flops_s=None if stack.float8 == "none" else device.peak_flops_s("float8") * best,
        )
        self._roofline = RooflinePrices(self.rates)
        self._groups: dict[tuple[int, int, int], Links] = {}

    def prices(self, ranks: int) -> Prices:
        """What operators cost while `ranks` ranks are at work at once."""
        return self._roofline if self.measured is None else self.measured.prices(ranks)

    def group(self, ranks: int, *, stride: int, world: int) -> Links:
        """The group of `ranks` ranks of a world of `world` that lie `stride` apart, and its links."""
        key = (ranks, stride, world)
        if key not in self._groups:
            self._groups[key] = self._linked(ranks, stride, world)
        return self._groups[key]

    def _linked(self, ranks: int, stride: int, world: int) -> Links:
        if self.measured is not None:
            return self.measured.group(ranks, world)
        return group_of(self.cluster, ranks, stride=stride, world=world)


# The groups of a plan's axes, and their links: which ranks lie next to each other, and which lie far apart.


def tensor_group(plan: Plan, machine: Machine) -> Links:
    """Neighbouring ranks."""
    return machine.group(plan.layout.tensor, stride=1, world=plan.world_size)


def expert_group(plan: Plan, machine: Machine) -> Links:
    """Neighbouring ranks of shard x context x tensor."""
    return machine.group(plan.layout.expert, stride=1, world=plan.world_size)


def context_group(plan: Plan, machine: Machine) -> Links:
    """Ranks that hold other parts of the same samples."""
    return machine.group(plan.layout.context, stride=plan.layout.tensor, world=plan.world_size)


def shard_group(plan: Plan, machine: Machine) -> Links:
    """Ranks that hold the same stage and see other tokens: shard x context."""
    return machine.group(plan.state_ranks, stride=plan.layout.tensor, world=plan.world_size)


def stage_group(plan: Plan, machine: Machine) -> Links:
    """The ranks of one pipeline."""
    layout = plan.layout
    stride = layout.shard * layout.context * layout.tensor
    return machine.group(layout.pipeline, stride=stride, world=plan.world_size)


def replica_group(plan: Plan, machine: Machine) -> Links:
    """Ranks of the same place in all replicas."""
    layout = plan.layout
    stride = layout.pipeline * plan.state_ranks * layout.tensor
    return machine.group(layout.replicate, stride=stride, world=plan.world_size)


def ends_group(plan: Plan, machine: Machine) -> Links:
    """The first and the last stage of a pipeline."""
    layout = plan.layout
    stride = plan.state_ranks * layout.tensor * (layout.pipeline - 1)
    return machine.group(2, stride=stride, world=plan.world_size)


def world_group(plan: Plan, machine: Machine) -> Links:
    """All ranks."""
    return machine.group(plan.world_size, stride=1, world=plan.world_size)


# Communication beside computation: what is seen of it, and what hiding the rest costs.


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Communication that is seen, and computation that hidden communication slows down, seconds."""

    seen_s: float
    slowed_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.seen_s + self.slowed_s


def exposed(communication_s: float, beside_s: float, *, slowdown: float) -> Exposed:
    """What `beside_s` seconds of computation cannot hide, and what hiding costs them."""
    hidden = min(communication_s, beside_s)
    return Exposed(seen_s=communication_s - hidden, slowed_s=hidden * slowdown)
