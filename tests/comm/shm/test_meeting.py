"""Meetings of threads over socket pairs."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest

from shoal.comm.shm.meeting import Meeting


def meetings(size: int, *, timeout_s: float = 10.0) -> list[Meeting]:
    """One a rank."""
    streams: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        streams[a][b], streams[b][a] = socket.socketpair()
    return [Meeting(of, timeout_s=timeout_s) for of in streams]


def test_nobody_leaves_a_meeting_before_all_have_come() -> None:
    """Over many meetings of four ranks at their own pace, no count is ever behind when a rank comes out."""
    ranks, counts, late = meetings(4), [0] * 4, []

    def run(rank: int) -> None:
        for number in range(1, 101):
            if (number + rank) % 7 == 0:
                time.sleep(0.0005)
            counts[rank] = number
            ranks[rank]()
            late.extend(count for count in counts if count < number)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == [100] * 4
    assert late == []


def test_a_rank_that_left_is_named() -> None:
    """The end of a stream is an error at once, long before the timeout, and says whose it was."""
    here, there, _absent = meetings(3, timeout_s=60.0)
    there.close()
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1"):
        here()


def test_who_came_and_then_left_has_come() -> None:
    """A peer that ends after a meeting does not spoil it for those who are later; the next one it does."""
    here, there = meetings(2)
    coming = threading.Thread(target=there, daemon=True)
    coming.start()
    here()
    coming.join(10)
    there.close()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        here()


def test_one_who_does_not_come_is_named_after_the_timeout() -> None:
    """Alive and silent: which rank is awaited, and how long. A rank that came is not blamed."""
    first, second, _absent, _absent_too = meetings(4, timeout_s=0.05)
    with pytest.raises(RuntimeError, match=r"Timed out after 0\.05 s waiting for rank 1 of the group"):
        first()
    with pytest.raises(RuntimeError, match="waiting for rank 2 of the group"):
        second()
