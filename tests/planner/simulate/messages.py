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


def pairwise_all_to_all(ranks: int, size: float) -> list[Step]:
    """In step k each rank sends an n-th to the rank k further on."""
    return [[(rank, (rank + step) % ranks, size / ranks) for rank in range(ranks)] for step in range(1, ranks)]


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
