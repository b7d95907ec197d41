"""Collectives on a cluster: which links a group uses, and what one collective of it takes.

A group has `local` ranks on each of its nodes. All groups of an axis talk at the same time, so the ports of a node are
shared by all of its devices. What a group gets of them depends on the algorithm:

    ring          one stream enters and leaves each node of the group, through the ports of all its ranks there:
                  local / (devices in use per node) of the node's rate
    all-to-all    every rank sends (n - local)/n of its own bytes out of its node: 1 / (devices in use per node) of it

A ring through nodes moves at the slower of the two levels; NCCL chooses between ring and tree, and so does
`all_reduce`. In an all-to-all both levels are busy at the same time, and messages to one node leave together.
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
    """Ranks that take part in one collective, and the links between them.

    `bytes_s` is the rate of a ring through all of them. `inside` and `outside` are the links of one rank in its node
    and to the others: (seconds of a step, bytes per second).
    """

    ranks: int
    local: int
    start_s: float
    step_s: float
    bytes_s: float
    inside: tuple[float, float]
    outside: tuple[float, float]

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
        latency_s, bytes_s = self.inside
        near = size * self.local / self.ranks
        inside = alpha_beta.pairwise_all_to_all(self.local, near, latency_s=latency_s, bytes_s=bytes_s)
        latency_s, bytes_s = self.outside
        nodes = -(-self.ranks // self.local)
        outside = (nodes - 1) * latency_s + (size - near) / bytes_s
        return self.start_s + max(inside, outside)

    def send(self, size: float) -> float:
        """Seconds for `size` bytes from one rank to the next."""
        return self.step_s + self.start_s / 2 + size / self.bytes_s


def group_of(cluster: Cluster, ranks: int, *, stride: int, world: int) -> Group:
    """The group of an axis (or a block of neighbouring axes) whose members lie `stride` ranks apart."""
    machine = cluster.machine
    per_node = min(machine.devices, world)
    local = max(1, min(ranks, per_node // stride))
    up, out = machine.scale_up, machine.scale_out
    inside = (up.latency_s, up.bytes_s)
    start_s = machine.start_us * 1e-6
    if local >= ranks:
        return Group(
            ranks=ranks,
            local=local,
            start_s=start_s,
            step_s=inside[0],
            bytes_s=inside[1],
            inside=inside,
            outside=inside,
        )
    own = out.bytes_s * cluster.network.share(-(-ranks * stride // per_node)) / per_node
    steps = -(-ranks // local)
    return Group(
        ranks=ranks,
        local=local,
        start_s=start_s,
        step_s=((ranks - steps) * up.latency_s + steps * out.latency_s) / ranks,
        bytes_s=min(own * local, up.bytes_s) if local > 1 else own,
        inside=inside,
        outside=(out.latency_s, own),
    )
