"""A barrier that names who does not come, as c10d's `monitored_barrier`, through the group's store.

    every rank   publishes that it is here
    rank 0       waits for the others, then publishes who did not come

Gloo's own speaks over its connections. Where two ranks have not spoken yet, one of them waits for its connection first,
as long as the group's timeout, whatever the barrier's is (torch 2.13). And a barrier that fails breaks no connection
here: collectives go on.
"""

from __future__ import annotations

import time
from datetime import timedelta

from shoal.comm.board import Board

LOOK_S = 0.01


class MonitoredBarrier:
    """Of a group of `size` ranks. All ranks wait equally often, and no two at the same time on one rank."""

    def __init__(self, board: Board, *, rank: int, size: int) -> None:
        self._board, self._rank, self._size, self._number = board, rank, size, 0

    def wait(self, limit: timedelta, *, all_ranks: bool = False) -> None:
        """Blocks until all ranks are here.

        Raises `RuntimeError` where one is not within `limit`: on rank 0 with its number, or, with `all_ranks`, with
        the numbers of all that are missing; on the others that rank 0 knows more.
        """
        number, self._number = self._number, self._number + 1
        if self._rank == 0:
            self._wait_for_all(number, limit, all_ranks=all_ranks)
        else:
            self._wait_for_word(number, limit)

    def _wait_for_all(self, number: int, limit: timedelta, *, all_ranks: bool) -> None:
        keys = {f"{number}/{rank}": rank for rank in range(1, self._size)}
        missing = [keys[key] for key in self._missing(list(keys), limit)]
        self._board.publish(f"{number}/missing", " ".join(map(str, missing)))
        if missing:
            raise RuntimeError(_sentence(missing if all_ranks else missing[:1], limit, came=len(keys) - len(missing)))
        self._board.forget([*keys, f"{number - 1}/missing"])  # which all have read: they are here

    def _wait_for_word(self, number: int, limit: timedelta) -> None:
        self._board.publish(f"{number}/{self._rank}", "")
        key = f"{number}/missing"
        word = None if self._missing([key], limit) else self._board.collect([key])[0].decode()
        if word != "":
            said = "rank 0 has not come" if word is None else f"rank 0 missed rank {word}"
            raise RuntimeError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but {said} within {_ms(limit)} ms. Please "
                "check rank 0 logs for faulty rank."
            )

    def _missing(self, keys: list[str], limit: timedelta) -> list[str]:
        """Those of `keys` that are not published within `limit`. It looks itself: a store of a file would sleep for a
        second in each wait (torch 2.13)."""
        end_s = time.monotonic() + limit.total_seconds()
        while (keys := [key for key in keys if not self._board.published(key)]) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        return keys


def _sentence(missing: list[int], limit: timedelta, *, came: int) -> str:
    """In c10d's words, which users and their scripts look for."""
    ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return (
        f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {_ms(limit)} ms (Rank 0 timed out in monitoredBarrier "
        f"after {_ms(limit)} ms; {came} other ranks reached it)"
    )


def _ms(limit: timedelta) -> int:
    return round(1e3 * limit.total_seconds())
