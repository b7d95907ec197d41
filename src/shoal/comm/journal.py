"""What a rank called and when: each collective and message from its start to its end, and where its caller stood still.

The ledger adds up; the journal keeps every call by itself, for a profile of a few steps. A ledger without a journal
pays nothing for it. Calls of one group are numbered from the moment at which the journal was opened: ranks that open
theirs between the same two calls find each other's calls by `key`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Call:
    """One call of this rank. Times are those of `time.perf_counter`; `end_s` is None until somebody has seen its end.

    `key` is the same on all ranks that take part: the group, the operation and its number, for a message also its two
    ends. `ranks` is how many take part.
    """

    key: str
    operation: str
    ranks: int
    sent_bytes: int
    begin_s: float
    end_s: float | None = None


@dataclass(frozen=True)
class Wait:
    """The rank stood still from `begin_s` to `end_s` for the call of this key; "" where the call was over before."""

    key: str
    operation: str
    begin_s: float
    end_s: float


class Journal:
    """The calls since it was made, in the order of their starts, and the waits. Several threads may use it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.waits: list[Wait] = []
        self._ended: dict[str, Call] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def began(
        self, group: str, operation: str, *, size: int, ends: tuple[int, int] | None, sent_bytes: int,
        then: Callable[[], object],
    ) -> Callable[[], None]:  # fmt: skip
        """A call begins now. Returns what is to be called at its end, which calls `then`.

        `size` is the group's; `ends` are a message's sender and receiver in the group, None for a collective.
        """
        name = f"{group}/{operation}" if ends is None else f"{group}/message/{ends[0]}-{ends[1]}"
        with self._lock:
            call = Call(
                f"{name}/{self._counts[name]}", operation, size if ends is None else 2, sent_bytes, time.perf_counter()
            )
            self._counts[name] += 1
            self.calls.append(call)

        def ended() -> None:
            then()
            with self._lock:
                call.end_s = time.perf_counter()
                self._ended[operation] = call

        return ended

    def waited(self, operation: str, seconds: float) -> None:
        """The caller has stood still until now for the call of `operation` that ended last."""
        if seconds <= 0:
            return
        end_s = time.perf_counter()
        begin_s = end_s - seconds
        with self._lock:
            call = self._ended.get(operation)
            known = call is not None and call.end_s is not None and call.end_s >= begin_s
            self.waits.append(Wait(call.key if call is not None and known else "", operation, begin_s, end_s))
