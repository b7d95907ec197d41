"""Who waits for whom: ranks are in a deadlock only when nobody in it can be helped."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shoal.comm.board import Board
from shoal.comm.checking import WaitGraph, WatchedWait
from shoal.errors import CollectiveError
from tests.waiting import HANG_S

GROUPS = {"left": (0, 1), "right": (1, 2), "all": (0, 1, 2)}


def graphs() -> list[WaitGraph]:
    """Of three ranks, which have the groups that they are in."""
    store, made = dist.HashStore(), []
    for rank in range(3):
        graph = WaitGraph(Board(store, timeout_s=HANG_S), rank)
        for name, ranks in GROUPS.items():
            if rank in ranks:
                graph.enter(name, ranks)
        made.append(graph)
    return made


def called(graph: WaitGraph, *groups: str) -> WatchedWait:
    """Calls in these groups; for the wait in the last one."""
    waits = [graph.call(group, f"a call in {group}") for group in groups]
    return waits[-1]


def test_ranks_that_wait_in_a_circle_are_a_cycle() -> None:
    """0 waits for 1 in one group, 1 for 2 in another, 2 for both in a third: each is told of all."""
    waits = [called(graph, group) for graph, group in zip(graphs(), ("left", "right", "all"), strict=True)]
    for wait in (*waits, *waits):  # the first look writes, the second sees, the third sees the same
        wait.look()
    for wait in waits:
        with pytest.raises(CollectiveError, match=r"rank 0 waits in a call in left.*rank 1 .*right.*rank 2 .*all"):
            wait.look()


def test_calls_that_all_have_made_are_no_cycle() -> None:
    """Ranks may be slow to see that everybody has come: who has made the call is not waited for."""
    waits = [called(graph, "left", "all") if rank == 0 else called(graph, "all") for rank, graph in enumerate(graphs())]
    for _ in range(4):
        for wait in waits:
            wait.look()


def test_somebody_who_does_not_wait_may_still_come() -> None:
    """Ranks 0 and 1 wait for each other's calls and for rank 2, which computes: nothing is concluded."""
    three = graphs()
    waits = [called(three[0], "all"), called(three[1], "right")]
    for _ in range(4):
        for wait in waits:
            wait.look()


def test_who_waits_no_more_is_withdrawn() -> None:
    """A wait that came to its end leaves nothing behind; one that failed leaves its reason."""
    three = graphs()
    with called(three[0], "all") as wait:
        wait.look()
    assert three[0].cycle() == {}
    three[1].conclude("the reason")
    failing = called(three[2], "all").__enter__()
    failing.look()
    with pytest.raises(CollectiveError, match="the reason"):
        failing.__exit__(RuntimeError)  # rank 1 has closed the group
