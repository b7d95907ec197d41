"""What went over the wire: calls, bytes by link level and exposed seconds of every collective, since the last look.

Levels are two: to ranks of the same host, and to those of other hosts. Bytes are those of `shoal.comm.volume`, which
says what is and what is not in them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sent:
    """Bytes to ranks of the same host, and to those of others."""

    inside_bytes: int = 0
    between_bytes: int = 0

    @property
    def bytes_sent(self) -> int:
        """Both."""
        return self.inside_bytes + self.between_bytes


# What a rank called and when: each collective and message from its start to its end, and where its caller stood still.
#
# The ledger adds up; the journal keeps every call by itself, for a profile of a few steps. A ledger without a journal
# pays nothing for it. Calls of one group are numbered from the moment at which the journal was opened: ranks that open
# theirs between the same two calls find each other's calls by `key`.


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


@dataclass(frozen=True)
class Entry:
    """One kind of collective: how often, how many bytes this rank sent inside its host and to others, how long its
    caller stood still for it (`exposed_s`), and did other things between its start and the wait for it (`hidden_s`).

    A collective that is over before it is waited for counts as hidden until then.
    """

    calls: int = 0
    inside_bytes: int = 0
    between_bytes: int = 0
    exposed_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def bytes_sent(self) -> int:
        """To all ranks."""
        return self.inside_bytes + self.between_bytes

    def __add__(self, other: Entry) -> Entry:
        return Entry(
            self.calls + other.calls,
            self.inside_bytes + other.inside_bytes,
            self.between_bytes + other.between_bytes,
            self.exposed_s + other.exposed_s,
            self.hidden_s + other.hidden_s,
        )


_Sum = list[Any]
"""The fields of an `Entry` while they grow."""
NOTHING = Sent()


@dataclass
class Ledger:
    """Adds up entries by operation. `take` returns what has come together and starts again from nothing.

    Several threads may use it. Waiting of a thread that is `behind` holds up nobody: it counts as hidden. `journal`
    keeps every call by itself, where a profile asks for it.
    """

    journal: Journal | None = None
    _sums: dict[str, _Sum] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _threads_behind: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    @property
    def entries(self) -> dict[str, Entry]:
        """Those since the last call of `take`."""
        with self._lock:
            return {operation: Entry(*sums) for operation, sums in self._sums.items()}

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Around what a thread waits for while another computes; that one books itself where it stands still."""
        self._threads_behind.add(threading.get_ident())
        try:
            yield
        finally:
            self._threads_behind.discard(threading.get_ident())

    def sent(self, operation: str, sent: Sent) -> None:
        """One call that puts `sent` on the wire."""
        self._add(operation, 1, sent, 0.0, 0.0)

    def waited(self, operation: str, exposed_s: float, hidden_s: float = 0.0) -> None:
        """The caller stood still for `exposed_s` seconds, `hidden_s` after the start."""
        if threading.get_ident() in self._threads_behind:
            exposed_s, hidden_s = 0.0, exposed_s + hidden_s
        if self.journal is not None:
            self.journal.waited(operation, exposed_s)
        self._add(operation, 0, NOTHING, exposed_s, hidden_s)

    def made(self, operation: str, sent: Sent, exposed_s: float) -> None:
        """A call that its caller waited for from its start to its end."""
        self._add(operation, 1, sent, exposed_s, 0.0)

    def total(self) -> Entry:
        """The sum over all operations."""
        return sum(self.entries.values(), Entry())

    @property
    def exposed_s(self) -> float:
        """How long callers have stood still since the last call of `take`."""
        with self._lock:
            return sum((exposed_s for _, _, _, exposed_s, _ in self._sums.values()), 0.0)

    def take(self) -> dict[str, Entry]:
        """The entries since the last call of this method."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return {operation: Entry(*sums) for operation, sums in taken.items()}

    def _add(self, operation: str, calls: int, sent: Sent, exposed_s: float, hidden_s: float) -> None:
        """In every call of a collective: numbers in place, no new entry."""
        with self._lock:
            sums = self._sums.get(operation)
            if sums is None:
                sums = self._sums[operation] = [0, 0, 0, 0.0, 0.0]
            sums[0] += calls
            sums[1] += sent.inside_bytes
            sums[2] += sent.between_bytes
            sums[3] += exposed_s
            sums[4] += hidden_s
