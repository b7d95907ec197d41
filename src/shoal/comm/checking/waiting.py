"""Who waits for whom: ranks that wait in different groups, each for the other, are found and named.

A rank that has waited for a second writes on the board what it waits in, and how many calls it has made in every group.
So others see whom its call still misses. If all whom it misses wait as well, and all whom those miss, and so on, then
nobody is left who could make the call that one of them needs: a deadlock, once two looks have found the same.
(The wait-for graph of Holt, ACM Computing Surveys 4(3), 1972.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from shoal.errors import CollectiveError

LOOK_S = 1.0
"""How long a call may wait for other ranks before the reason is looked for."""
SLICE_S = 0.25
"""How long a wait goes on before it asks whether anything was heard."""


class Waiting(NamedTuple):
    """What one rank waits in, in its `turn`-th long wait: call `call` of a group of `ranks` of the world.

    `made` are the calls that it has made, by group.
    """

    turn: int
    group: str
    call: int
    ranks: Sequence[int]
    what: str
    made: Mapping[str, int]


class Board:
    """What one rank writes and reads, for all its groups."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._groups: dict[str, Sequence[int]] = {}
        self._made: dict[str, int] = {}
        self._turn = 0
        self.failed: CollectiveError | None = None
        """What is wrong in one of this rank's groups. Whoever waits in another shall not wait for its ranks."""

    def enter(self, group: str, ranks: Sequence[int]) -> None:
        """This rank has a group of these ranks of the world; its label is the same on all of them."""
        self._groups[group], self._made[group] = ranks, 0

    def ranks(self, group: str) -> Sequence[int]:
        """The ranks of a group that was entered."""
        return self._groups[group]

    def call(self, group: str, what: object) -> Stall:
        """This rank makes a call in a group, which `str(what)` describes; for the wait that follows."""
        self._made[group] += 1
        return Stall(self, group, self._made[group], what)

    def write(self, group: str, call: int, what: object) -> None:
        """This rank waits."""
        self._turn += 1
        told = f"{what}, call number {call} of group '{group}'"
        row = Waiting(self._turn, group, call, self._groups[group], told, self._made)
        self._store.set(f"waits/{self._rank}", json.dumps(row))

    def wipe(self) -> None:
        """It waits no more."""
        self._store.set(f"waits/{self._rank}", "")

    def knot(self) -> dict[int, Waiting]:
        """Those who wait for each other, this rank among them; empty where one of them may still go on."""
        found: dict[int, Waiting] = {}
        open_ = [self._rank]
        while open_:
            rank = open_.pop()
            row = self._read(rank)
            rows = {} if row is None else {other: self._read(other) for other in row.ranks}
            missed = [o for o, their in rows.items() if their and row and their.made.get(row.group, 0) < row.call]
            if row is None or None in rows.values() or not missed:
                return {}
            found[rank] = row
            open_ += [other for other in missed if other not in found]
        return found

    def conclude(self, sentence: str) -> None:
        """A deadlock was found: the first to leave it says so to those whom that will surprise."""
        self._store.set("waits/verdict", sentence)

    def verdict(self) -> str:
        """What was concluded; empty where nothing was."""
        there = self._store.check(["waits/verdict"])
        return self._store.get("waits/verdict").decode() if there else ""

    def _read(self, rank: int) -> Waiting | None:
        key = f"waits/{rank}"
        text = self._store.get(key) if self._store.check([key]) else b""
        return Waiting(*json.loads(text)) if text else None


class Stall:
    """One wait: a context, in which `look` is called when it lasts."""

    def __init__(self, board: Board, group: str, call: int, what: object) -> None:
        self._board, self._group, self._call, self._what = board, group, call, what
        self._written = False
        self._seen: dict[int, Waiting] = {}

    def __enter__(self) -> Stall:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A rank that gives up stays on the board: the others may rely on it. It says why, where others know."""
        if self._written and kind is None:
            self._board.wipe()
        failed = self._written and kind is not None and issubclass(kind, RuntimeError)
        if failed and (sentence := self._board.verdict()):
            raise CollectiveError(sentence) from None

    def look(self) -> None:
        """Raises `CollectiveError` where ranks wait for each other, now and before, or another group failed."""
        if self._board.failed is not None:
            raise self._board.failed
        if not self._written:
            self._board.write(self._group, self._call, self._what)
            self._written = True
            return
        found = self._board.knot()
        if found and found == self._seen:
            self._board.conclude(sentence := deadlock(found))
            raise CollectiveError(sentence)
        self._seen = found


def waited(work: Any, limit_s: float) -> bool:
    """Whether `work` is over within so long. Raises what it raises; it may be waited for again."""
    try:
        return work.wait(timedelta(seconds=limit_s))
    except RuntimeError:
        if not work.is_completed():
            return False
    return work.wait()  # it may have ended well just after the time was over


def patiently(attempt: Callable[[float], bool], hear: Callable[[], None], stall: Stall | None) -> None:
    """Tries `attempt(seconds)` again and again until it succeeds; in between, hears, and looks where it lasts."""
    slices = 0
    while not attempt(SLICE_S):
        hear()
        slices += 1
        if stall is not None and slices % round(LOOK_S / SLICE_S) == 0:
            stall.look()


def deadlock(found: Mapping[int, Waiting]) -> str:
    """The sentence that names who waits in what."""
    told = "; ".join(f"rank {rank} waits in {row.what}" for rank, row in sorted(found.items())[:8])
    return (
        f"ranks wait for each other: {told}: ranks that share groups have to make their calls in the same order; make "
        "the orders alike"
    )
