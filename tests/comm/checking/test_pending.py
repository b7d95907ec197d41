"""Calls that are pending when a difference is found: who waits for them hears of it, whatever the threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm.checking.disagreement import Dissent
from shoal.comm.checking.fingerprint import Comparison
from shoal.comm.checking.pending import Call, Pending
from shoal.comm.checking.revocable import Revocable
from shoal.errors import CollectiveError

MEANWHILE_S = 0.2


class Asked:
    """The work of a comparison; `meanwhile` runs in the first wait for it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = [meanwhile]

    def wait(self, timeout: timedelta | None = None) -> bool:
        while self._meanwhile:
            self._meanwhile.pop()()
        return True

    def is_completed(self) -> bool:
        return False


def nothing() -> None:
    """No difference."""


def test_a_difference_found_in_a_wait_is_what_the_waiter_hears() -> None:
    """Another thread finds it and gives the group up, while this one goes on with the calls."""
    group = Revocable("a group")
    pending = Pending(Dissent(dist.HashStore()), lambda number: None, (group,), None)
    threads: list[threading.Thread] = []

    def differ() -> None:
        pending._error = CollectiveError("call number 2 differs")
        threads.append(threading.Thread(target=pending.give_up))
        threads[0].start()
        threads[0].join(MEANWHILE_S)

    calls = [Call(number, Comparison(torch.zeros(2, 4, dtype=torch.int64), Asked(meanwhile)), lambda: None)
             for number, meanwhile in ((1, differ), (2, nothing))]  # fmt: skip
    for call in calls:
        pending.add(call)
    with pytest.raises(CollectiveError, match="call number 2 differs"):
        pending.finish(calls[1], None)
    threads[0].join()
    with pytest.raises(CollectiveError, match="closed"):
        _ = group.group
