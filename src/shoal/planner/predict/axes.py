"""The groups of a plan's axes, and their links: which ranks lie next to each other, and which lie far apart.

Communication beside computation: what is seen of it, and what hiding the rest costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.plan import Plan
from shoal.cost.wire import Links
from shoal.planner.predict.machine import Machine


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
