"""How far each rank's clock is from rank 0's, measured through the run's store (Cristian, 1989).

A rank writes a word, rank 0 answers with its time, and the rank takes that for the time in the middle of the exchange:

    offset = t_0 - (t_sent + t_received) / 2,    wrong by at most (t_received - t_sent) / 2

Of several exchanges the fastest counts. Both ways lead through the store, so that they are alike. An offset below its
own error cannot be told from zero and is zero: ranks of one host share a clock, and no exchange is as exact as that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.board import bounded

EXCHANGES = 8
TIMEOUT_S = 60.0
"""What all exchanges of a rank may take, and for each rank before it in the row again."""


@dataclass(frozen=True)
class ClockOffset:
    """Seconds to add to this rank's clock to have rank 0's, wrong by `error_s` at most."""

    offset_s: float
    error_s: float


def measure_offset(
    store: Store, *, rank: int, ranks: int, name: str, now: Callable[[], float] = time.time
) -> ClockOffset:
    """This rank's offset to rank 0's. All ranks call it, under a `name` that is used once.

    Raises `CollectiveError` where a rank does not come in time.
    """
    here = PrefixStore(f"clock/{name}", store)
    if rank == 0:
        bounded(lambda: _answer(here, ranks, now), timeout_s=TIMEOUT_S * max(1, ranks - 1))
        return ClockOffset(0.0, 0.0)
    return offset_of(bounded(lambda: _ask(here, rank, now), timeout_s=TIMEOUT_S * ranks))


def offset_of(exchanges: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """From (sent, rank 0's time, received) of each exchange."""
    sent_s, theirs_s, received_s = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    offset_s, error_s = theirs_s - (sent_s + received_s) / 2, (received_s - sent_s) / 2
    return ClockOffset(offset_s if abs(offset_s) > error_s else 0.0, error_s)


def _answer(store: Store, ranks: int, now: Callable[[], float]) -> None:
    for rank in range(1, ranks):
        for exchange in range(EXCHANGES):
            store.get(f"{rank}/{exchange}/asked")
            store.set(f"{rank}/{exchange}/told", repr(now()))


def _ask(store: Store, rank: int, now: Callable[[], float]) -> list[tuple[float, float, float]]:
    found = []
    for exchange in range(EXCHANGES):
        sent_s = now()
        store.set(f"{rank}/{exchange}/asked", "")
        theirs_s = float(store.get(f"{rank}/{exchange}/told"))
        found.append((sent_s, theirs_s, now()))
    return found
