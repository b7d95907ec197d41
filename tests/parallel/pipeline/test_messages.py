"""Schedules over a backend that keeps all calls of a group in one sequence, as NCCL does."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.messages import Messages, Pair, PairedMessages, messages_of
from shoal.errors import CollectiveError
from shoal.parallel.context.ring import pairs_of_ring
from shoal.parallel.pipeline.execute import Computation, run_pipeline
from shoal.schedules.build import NAMES, build
from shoal.schedules.table import ScheduleTable, forward_only
from tests.parallel.pipeline.in_sequence import Network, ThreadMesh

RANKS, MICROBATCHES = 4, 8
Between = Callable[[Network, int, ScheduleTable], Messages]


def apart(network: Network, rank: int, table: ScheduleTable) -> Messages:
    """Each sender and receiver in a group of its own."""
    mesh: Any = ThreadMesh(network, rank)
    return PairedMessages(mesh, range(table.ranks), table.pairs)


def together(network: Network, rank: int, table: ScheduleTable) -> Messages:
    """All of them in one group."""
    return network.member(rank, range(table.ranks))


def one_rank(table: ScheduleTable, messages: Messages, group: Any) -> float | None:
    """The loss of a chain in which each stage multiplies by a weight of its own, 2."""
    weights = {stage: torch.tensor(2.0, requires_grad=True) for stage in table.stages_of(group.rank)}

    def forward(stage: int, x: Tensor | None, context: Tensor) -> Tensor:
        return (context if x is None else x) * weights[stage]

    computation = Computation(forward, lambda output, _: output.sum(), lambda stage: [weights[stage]])
    contexts = [torch.full((2,), float(number)) for number in range(table.microbatches)]
    found = run_pipeline(table, group, computation, contexts, device=torch.device("cpu"), messages=messages)
    expected = 2 * sum(range(table.microbatches)) * 2.0 ** (table.stages - 1)
    for weight in weights.values():
        assert (weight.grad is not None) == table.has_backward
        assert weight.grad is None or weight.grad.item() == expected
    return None if found.loss is None else found.loss.item()


def run(table: ScheduleTable, between: Between) -> list[float | None]:
    network = Network(table.ranks)

    def ranked(rank: int) -> float | None:
        try:
            return one_rank(table, between(network, rank, table), network.member(rank, range(table.ranks), "world"))
        finally:
            network.leave()

    with ThreadPoolExecutor(table.ranks) as threads:
        return list(threads.map(ranked, range(table.ranks)))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "PipeDream"])
def test_a_schedule_ends_where_a_group_keeps_its_calls_in_one_sequence(name: str) -> None:
    """And computes what it should, forward alone, too."""
    table = build(name, ranks=RANKS, microbatches=MICROBATCHES)
    for each in (table, forward_only(table, 1)):
        losses = [loss for loss in run(each, apart) if loss is not None]
        assert losses == [2 * sum(range(each.microbatches)) * 2.0**each.stages]


def test_in_one_group_a_receive_that_is_posted_ahead_stops_the_schedule() -> None:
    """Why there are groups of two: NCCL would stand still for ever."""
    with pytest.raises(CollectiveError, match="never ran"):
        run(build("1F1B", ranks=RANKS, microbatches=MICROBATCHES), together)


@dataclass
class Openings:
    """A mesh of `device` that notes which groups a rank opens, in order."""

    rank: int
    device: torch.device
    opened: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def ranks(self, ranks: Sequence[int], *, lane: str = "") -> Any:
        self.opened.append((tuple(ranks), lane))
        return self

    def send(self, *_: Any, **__: Any) -> Any:
        return self

    recv = send

    def wait(self) -> None:
        """Nothing is sent."""


def turns(size: int, pairs: Sequence[Pair]) -> int:
    """In how many turns all groups are open: in each turn those that come next on both of their ranks."""
    meshes: list[Any] = [Openings(rank, torch.device("cpu")) for rank in range(size)]
    for mesh in meshes:
        PairedMessages(mesh, range(size), pairs)
    left = [deque(mesh.opened) for mesh in meshes]
    for turn in itertools.count(1):
        firsts = {own[0] for own in left if own}
        open_now = {each for each in firsts if all(left[rank] and left[rank][0] == each for rank in each[0])}
        for each in open_now:
            for rank in each[0]:
                left[rank].popleft()
        if not any(left):
            return turn
        assert open_now, "ranks wait for each other"
    raise AssertionError


@pytest.mark.parametrize("size", [3, 4, 7, 8, 64])
def test_the_groups_of_many_ranks_open_at_once(size: int) -> None:
    """Not one behind the other: of 64 stages the last would give up on the one before it."""
    chain = [hop for here, there in pairwise(range(size)) for hop in ((here, there), (there, here))]
    closed = [*chain, (size - 1, 0), (0, size - 1)]
    assert turns(size, chain) <= 4
    assert turns(size, closed) <= 8
    assert turns(size, pairs_of_ring(size)) <= 4


def test_groups_of_two_are_for_gpus_alone() -> None:
    """On a CPU messages go over the group of all, as ever."""
    here: Any = Openings(0, torch.device("cpu"))
    assert messages_of(here, range(4), [(0, 1)]) is here
    assert here.opened == [((0, 1, 2, 3), "")]
    there: Any = Openings(0, torch.device("cuda"))
    assert isinstance(messages_of(there, range(4), [(1, 2)]), PairedMessages)
    assert there.opened == []
