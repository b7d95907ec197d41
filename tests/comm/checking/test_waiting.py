"""Who waits for whom, on a board: a knot is one only when nobody in it can be helped."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from shoal.comm.checking.waiting import Board, Stall, waited
from shoal.errors import CollectiveError

GROUPS = {"left": (0, 1), "right": (1, 2), "all": (0, 1, 2)}


def boards() -> list[Board]:
    """Of three ranks, which have the groups that they are in."""
    store, made = dist.HashStore(), []
    for rank in range(3):
        board = Board(store, rank)
        for name, ranks in GROUPS.items():
            if rank in ranks:
                board.enter(name, ranks)
        made.append(board)
    return made


def called(board: Board, *groups: str) -> Stall:
    """Calls in these groups; for the wait in the last one."""
    stalls = [board.call(group, f"a call in {group}") for group in groups]
    return stalls[-1]


def test_ranks_that_wait_in_a_circle_are_a_knot() -> None:
    """0 waits for 1 in one group, 1 for 2 in another, 2 for both in a third: each is told of all."""
    stalls = [called(board, group) for board, group in zip(boards(), ("left", "right", "all"), strict=True)]
    for stall in (*stalls, *stalls):  # the first look writes, the second sees, the third sees the same
        stall.look()
    for stall in stalls:
        with pytest.raises(CollectiveError, match=r"rank 0 waits in a call in left.*rank 1 .*right.*rank 2 .*all"):
            stall.look()


def test_calls_that_all_have_made_are_no_knot() -> None:
    """Ranks may be slow to see that everybody has come: who has made the call is not waited for."""
    stalls = [
        called(board, "left", "all") if rank == 0 else called(board, "all") for rank, board in enumerate(boards())
    ]
    for _ in range(4):
        for stall in stalls:
            stall.look()


def test_somebody_who_does_not_wait_may_still_come() -> None:
    """Ranks 0 and 1 wait for each other's calls and for rank 2, which computes: nothing is concluded."""
    three = boards()
    stalls = [called(three[0], "all"), called(three[1], "right")]
    for _ in range(4):
        for stall in stalls:
            stall.look()


def test_who_waits_no_more_is_wiped_off() -> None:
    """A wait that came to its end leaves nothing on the board; one that failed leaves its reason."""
    three = boards()
    with called(three[0], "all") as stall:
        stall.look()
    assert three[0].knot() == {}
    three[1].conclude("the reason")
    failing = called(three[2], "all").__enter__()
    failing.look()
    with pytest.raises(CollectiveError, match="the reason"):
        failing.__exit__(RuntimeError)  # rank 1 has closed the group


class Ends:
    """A work that ends right behind a wait that has timed out, as one does that goes on when it is asked."""

    def __init__(self, error: str = "") -> None:
        self._error, self._over = error, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._over:
            raise RuntimeError("Timed out after 0.25 s")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        self._over = True
        return True


def test_a_call_that_ends_after_its_time_is_no_failure() -> None:
    """It is over, and raises what it raises itself: nothing, or its own error."""
    assert waited(Ends(), 0.25)
    with pytest.raises(RuntimeError, match="Connection closed"):
        waited(Ends("Connection closed by peer"), 0.25)
