"""Collectives as the messages that ranks send: the algorithms whose closed forms `cost.alpha_beta` gives.

Each rank has a port out and a port in (links are full duplex). A message of b bytes on a link of rate w and latency a
occupies both ends' ports for b/w and arrives a later. A rank's next message waits for what it received, the dependency
that makes a ring of n ranks take n - 1 steps, and for its own last one. On equal links and an idle network the seconds
are those of the closed form (a test holds it); with unequal links only playing them tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.planner.simulate.play import Tasks, play


@dataclass(frozen=True, kw_only=True)
class SimulatedLink:
    """From one rank to another: seconds of latency, bytes per second."""

    latency_s: float
    bytes_s: float


Step = list[tuple[int, int, float]]
"""Messages of one step of an algorithm: (from, to, bytes), at most one from each rank and one to each."""


def ring_all_gather(ranks: int, size: float) -> list[Step]:
    """n - 1 steps around the ring, an n-th each; a reduce-scatter sends the same."""
    return [[(rank, (rank + 1) % ranks, size / ranks) for rank in range(ranks)] for _ in range(ranks - 1)]


def ring_all_reduce(ranks: int, size: float) -> list[Step]:
    """A reduce-scatter, then an all-gather."""
    return ring_all_gather(ranks, size) * 2


def recursive_doubling(ranks: int, size: float) -> list[Step]:
    """Partners at distance 1, 2, 4, ... exchange everything. Powers of two only."""
    return [[(rank, rank ^ distance, size) for rank in range(ranks)] for distance in _distances(ranks)]


def halving_doubling(ranks: int, size: float) -> list[Step]:
    """Partners exchange a half, a quarter, ... of the vector, then the sums back. Powers of two only."""
    halving = [
        [(rank, rank ^ distance, size * distance / ranks) for rank in range(ranks)]
        for distance in reversed(_distances(ranks))
    ]
    return halving + halving[::-1]


def pairwise_all_to_all(ranks: int, size: float) -> list[Step]:
    """In step k each rank sends an n-th to the rank k further on."""
    return [[(rank, (rank + step) % ranks, size / ranks) for rank in range(ranks)] for step in range(1, ranks)]


def bruck_all_to_all(ranks: int, size: float) -> list[Step]:
    """In step k half of the vector goes 2^k ranks on. Powers of two only."""
    return [[(rank, (rank + jump) % ranks, size / 2) for rank in range(ranks)] for jump in _distances(ranks)]


def hierarchical_all_reduce(local: int, nodes: int, size: float) -> list[Step]:
    """Reduce-scatter in each node, all-reduce of a share among equal places, all-gather in each node."""
    inside = [
        _shifted(step, [range(node * local, (node + 1) * local) for node in range(nodes)])
        for step in ring_all_gather(local, size)
    ]
    between = [
        _shifted(step, [range(place, nodes * local, local) for place in range(local)])
        for step in ring_all_reduce(nodes, size / local)
    ]
    return inside + between + inside


def _shifted(step: Step, groups: Sequence[Sequence[int]]) -> Step:
    """The same step in every group at once."""
    return [(group[sender], group[receiver], size) for group in groups for sender, receiver, size in step]


def seconds(
    steps: Sequence[Step],
    ranks: int,
    link: SimulatedLink,
    *,
    links: Mapping[tuple[int, int], SimulatedLink] | None = None,
) -> float:
    """When the last message of an algorithm arrives; `links` replaces `link` for some pairs (from, to)."""
    tasks, special = Tasks(streams=0, ports=2 * ranks), links or {}
    before: list[list[int]] = [[] for _ in range(ranks)]
    for step in steps:
        numbers: list[list[int]] = [[] for _ in range(ranks)]
        for sender, receiver, size in step:
            way = special.get((sender, receiver), link)
            number = tasks.add(
                "message",
                "transfer",
                rank=sender,
                ports=(sender, ranks + receiver),
                busy_s=size / way.bytes_s,
                latency_s=way.latency_s,
                after=before[sender],
            )
            numbers[receiver].append(number)
            numbers[sender].append(number)
        before = [new or old for new, old in zip(numbers, before, strict=True)]
    return play(tasks).makespan_s


def _distances(ranks: int) -> list[int]:
    if ranks < 1 or ranks & (ranks - 1):
        raise ValueError(f"{ranks} ranks: this algorithm takes a power of two")
    return [1 << bit for bit in range(ranks.bit_length() - 1)]
