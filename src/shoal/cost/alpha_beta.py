"""Seconds of a collective: a latency for each step, and bytes over a rate (Hockney's alpha-beta model).

n ranks, S bytes (of the whole vector), latency a of one step, rate w. Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), except where noted:

    ring all-reduce              2(n-1) a + 2 (n-1)/n S/w
    ring all-gather, reduce-scatter   half of it
    double binary tree           2 log2 n a + 2 S/w             Sanders et al. 2009; NCCL's tree
    pairwise all-to-all          (n-1) a + (n-1)/n S/w          S: what one rank holds

All are monotone: more bytes, more ranks, a larger latency or a lower rate never make them faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.topology.calibration import CollectiveFit
from shoal.topology.cluster import Cluster


def ring_all_reduce(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """A reduce-scatter and an all-gather around a ring."""
    return 2 * ring_all_gather(ranks, size, latency_s=latency_s, bytes_s=bytes_s)


def ring_all_gather(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """Also a reduce-scatter; `size` is the whole vector."""
    return (ranks - 1) * latency_s + (ranks - 1) / ranks * size / bytes_s


def double_binary_tree(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """All-reduce over two trees that use both directions of every link."""
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * latency_s + 2 * size / bytes_s


def pairwise_all_to_all(ranks: int, size: float, *, latency_s: float, bytes_s: float) -> float:
    """Every rank sends an n-th of its `size` bytes to each other rank."""
    return (ranks - 1) * latency_s + (ranks - 1) / ranks * size / bytes_s


# The line through measured times of a collective: t = alpha + beta S (Hockney 1994), alpha and beta not negative.
#
# Times span four decades, and a microsecond counts as much at the short end as a millisecond at the long one. So what
# is least is the sum of the squared relative errors,
#
#     sum_i ((alpha + beta S_i - t_i) / t_i)^2,
#
# a weighted linear least-squares problem in two unknowns. A bound that is broken is kept by fitting the other alone.


@dataclass(frozen=True)
class Line:
    """Seconds of the shortest message, seconds of each further byte, and how far the worst point lies off."""

    alpha_s: float
    beta_s: float
    worst_off: float

    @property
    def bytes_s(self) -> float:
        """The rate that long messages reach, in bytes per second; infinite where time does not depend on size."""
        return 1 / self.beta_s if self.beta_s else float("inf")


def fit(sizes: Sequence[float], times_s: Sequence[float]) -> Line:
    """The line through at least two different `sizes` in bytes and their times, all positive.

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(times_s) or min(times_s) <= 0:
        raise ValueError(
            f"{len(set(sizes))} sizes with {len(times_s)} times; a line takes two sizes and positive times"
        )
    alpha, beta = _bounded(sizes, times_s)
    worst = max(abs(alpha + beta * size - time) / time for size, time in zip(sizes, times_s, strict=True))
    return Line(alpha, beta, worst)


def _bounded(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    weights = [1 / time**2 for time in times]
    one = sum(weights)
    s = sum(w * size for w, size in zip(weights, sizes, strict=True))
    ss = sum(w * size * size for w, size in zip(weights, sizes, strict=True))
    t = sum(w * time for w, time in zip(weights, times, strict=True))
    st = sum(w * size * time for w, size, time in zip(weights, sizes, times, strict=True))
    alpha, beta = (ss * t - s * st) / (one * ss - s * s), (one * st - s * t) / (one * ss - s * s)
    if alpha < 0:
        return 0.0, st / ss
    return (t / one, 0.0) if beta < 0 else (alpha, beta)


# Groups whose collectives were measured on this machine: alpha + beta S, as `topology.calibration` counts S.


@dataclass(frozen=True, kw_only=True)
class FittedGroup:
    """The same questions as `Group` answers. `fits` by operation; `crowd` multiplies all of them."""

    ranks: int
    fits: Mapping[str, CollectiveFit]
    crowd: float = 1.0

    @property
    def local(self) -> int:
        """All are on one node."""
        return self.ranks

    @property
    def spans_nodes(self) -> bool:
        """All are on one node."""
        return False

    @property
    def bytes_s(self) -> float:
        """Of a long message from one rank to the next."""
        return 1 / max(self.crowd * self.fits["send"].beta_s, 1e-15)

    def all_reduce(self, size: float) -> float:
        """Seconds to sum `size` bytes over the group."""
        return self._seconds("all_reduce", size)

    def all_gather(self, size: float) -> float:
        """Seconds until every rank has all `size` bytes."""
        return self._seconds("all_gather", size)

    def reduce_scatter(self, size: float) -> float:
        """Seconds until every rank has its part of the sum of `size` bytes."""
        return self._seconds("reduce_scatter", size)

    def all_to_all(self, size: float) -> float:
        """Seconds to exchange `size` bytes of every rank with all others."""
        return self._seconds("all_to_all", size)

    def send(self, size: float) -> float:
        """Seconds for `size` bytes from one rank to the next."""
        return self._seconds("send", size)

    def _seconds(self, operation: str, size: float) -> float:
        if self.ranks == 1:
            return 0.0
        fit = self.fits[operation]
        return self.crowd * (fit.alpha_s + fit.beta_s * size)


# Collectives on a cluster: which links a group uses, and what one collective of it takes.
#
# A group has `local` ranks on each of its nodes. All groups of an axis talk at the same time, so the ports of a node
# are shared by all of its devices. What a group gets of them depends on the algorithm:
#
#     ring          one stream enters and leaves each node of the group, through the ports of all its ranks there:
#                   local / (devices in use per node) of the node's rate
#     all-to-all    every rank sends (n - local)/n of its own bytes out of its node: 1 / (devices in use per node) of it
#
# A ring through nodes moves at the slower of the two levels; NCCL chooses between ring and tree, and so does
# `all_reduce`. In an all-to-all both levels are busy at the same time, and messages to one node leave together.


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
        ring = ring_all_reduce(self.ranks, size, latency_s=self.step_s, bytes_s=self.bytes_s)
        tree = double_binary_tree(self.ranks, size, latency_s=self.step_s, bytes_s=self.bytes_s)
        return self.start_s + min(ring, tree)

    def all_gather(self, size: float) -> float:
        """Seconds until every rank has all `size` bytes; a reduce-scatter takes as long."""
        if self.ranks == 1:
            return 0.0
        return self.start_s + ring_all_gather(self.ranks, size, latency_s=self.step_s, bytes_s=self.bytes_s)

    def all_to_all(self, size: float) -> float:
        """Seconds to exchange `size` bytes of every rank with all others."""
        if self.ranks == 1:
            return 0.0
        latency_s, bytes_s = self.inside
        near = size * self.local / self.ranks
        inside = pairwise_all_to_all(self.local, near, latency_s=latency_s, bytes_s=bytes_s)
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
