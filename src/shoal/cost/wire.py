"""Collectives on a cluster: which links a group uses, and what one collective of it takes.

A group has `local` ranks on each of its nodes. All groups of an axis talk at the same time, so the ports of a node are
shared: a group gets local / (devices in use per node) of them. A ring through nodes moves at the slower of the two
levels; NCCL chooses between ring and tree, and so does `all_reduce`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal.cost import alpha_beta
from shoal.topology.cluster import Cluster


class Links(Protocol):
    """What a prediction asks of a group of ranks: seconds of collectives by their bytes."""

    @property
    def ranks(self) -> int: ...

    @property
    def spans_nodes(self) -> bool: ...

    @property
    def bytes_s(self) -> float: ...

    def all_reduce(self, size: float) -> float: ...

    def all_gather(self, size: float) -> float: ...

    def all_to_all(self, size: float) -> float: ...

    def send(self, size: float) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that take part in one collective, and the links between them."""

    ranks: int
    local: int
    start_s: float
    step_s: float
    bytes_s: float

    @property
    def spans_nodes(self) -> bool:
        """Whether any of its traffic leaves a node."""
        return self.ranks > self.local

    def all_reduce(self, size: float) -> float:
        """Seconds to sum `size` bytes over the group."""
        if self.ranks == 1:
            return 0.0
        ring = alpha_beta.ring_all_reduce(self.ranks, size, latency_s=self.step_s, bytes_s=self.bytes_s)
        tree = alpha_beta.double_binary_tree(self.ranks, size, latency_s=self.step_s, bytes_s=self.bytes_s)
        return self.start_s + min(ring, tree)

    def all_gather(self, size: float) -> float:
        """Seconds until every rank has all `size` bytes; a reduce-scatter takes as long."""
        if self.ranks == 1:
            return 0.0
        return self.start_s + alpha_beta.ring_all_gather(self.ranks, size, latency_s=self.step_s, bytes_s=self.bytes_s)

    def all_to_all(self, size: float) -> float:
        """Seconds to exchange `size` bytes of every rank with all others."""
        if self.ranks == 1:
            return 0.0
        return self.start_s + alpha_beta.pairwise_all_to_all(
            self.ranks, size, latency_s=self.step_s, bytes_s=self.bytes_s
        )

    def send(self, size: float) -> float:
        """Seconds for `size` bytes from one rank to the next."""
        return self.step_s + self.start_s / 2 + size / self.bytes_s


def group_of(cluster: Cluster, ranks: int, *, stride: int, world: int) -> Group:
    """The group of an axis (or a block of neighbouring axes) whose members lie `stride` ranks apart."""
    machine = cluster.machine
    per_node = min(machine.devices, world)
    local = max(1, min(ranks, per_node // stride))
    up, out = machine.scale_up, machine.scale_out
    if local >= ranks:
        return Group(ranks=ranks, local=local, start_s=machine.start_us * 1e-6, step_s=up.latency_s, bytes_s=up.bytes_s)
    nodes_apart = -(-ranks * stride // per_node)
    ports = out.bytes_s * cluster.network.share(nodes_apart) * local / per_node
    rate = min(ports, up.bytes_s) if local > 1 else ports
    steps = -(-ranks // local)
    step_s = ((ranks - steps) * up.latency_s + steps * out.latency_s) / ranks
    return Group(ranks=ranks, local=local, start_s=machine.start_us * 1e-6, step_s=step_s, bytes_s=rate)
