"""Ranks that wait for each other in different groups are found and named.

A rank that has waited for a second publishes what it waits in, and how many calls it has made in every group. So the
others see which ranks its call still misses. If all the missing ranks wait as well, and all those that they miss, and
so on, then nobody is left who could make the call that one of them needs: a deadlock, once two looks have found the
same. (The wait-for graph of Holt, ACM Computing Surveys 4(3), 1972.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.comm.board import Board
from shoal.errors import CollectiveError

LOOK_S = 1.0
"""How long a call waits for other ranks before the reason is looked for, and between two looks."""
NAMED = 8


class BlockedCall(NamedTuple):
    """What one rank waits in: call `number` of a group of `ranks` of the world. `made` counts its calls by group."""

    group: str
    number: int
    ranks: Sequence[int]
    what: str
    made: Mapping[str, int]


class WaitGraph:
    """What one rank publishes and reads, for all its groups of one generation."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._groups: dict[str, Sequence[int]] = {}
        self._made: dict[str, int] = {}
        self.failed: CollectiveError | None = None
        """What is wrong in one of this rank's groups. Whoever waits in another must not wait for its ranks."""

    def enter(self, group: str, ranks: Sequence[int]) -> None:
        """Adds a group of these ranks of the world; its name is the same on all of them."""
        self._groups[group], self._made[group] = tuple(ranks), 0

    def ranks(self, group: str) -> Sequence[int]:
        """The ranks of a group that was entered."""
        return self._groups[group]

    def call(self, group: str, what: object) -> Wait:
        """Counts a call in a group, which `str(what)` describes; for the wait that follows."""
        self._made[group] += 1
        return Wait(self, group, self._made[group], what)

    def publish(self, group: str, number: int, what: object) -> None:
        """This rank waits."""
        described = f"{what}, call number {number} of group '{group}'"
        row = BlockedCall(group, number, self._groups[group], described, self._made)
        self._board.publish(f"waits/{self._rank}", json.dumps(row))

    def withdraw(self) -> None:
        """It waits no more."""
        self._board.forget([f"waits/{self._rank}"])

    def cycle(self) -> dict[int, BlockedCall]:
        """The ranks that wait for each other, this one among them; empty where one of them may still go on."""
        found: dict[int, BlockedCall] = {}
        open_ = {self._rank}
        while open_:
            rows = self._read(open_)
            others = self._read({rank for row in rows.values() for rank in row.ranks})
            missed: set[int] = set()
            for rank in open_:
                row = rows.get(rank)
                if row is None or any(other not in others for other in row.ranks):
                    return {}
                behind = {other for other in row.ranks if others[other].made.get(row.group, 0) < row.number}
                if not behind:
                    return {}
                found[rank] = row
                missed |= behind
            open_ = missed - found.keys()
        return found

    def conclude(self, sentence: str) -> CollectiveError:
        """A deadlock was found: the first rank to leave it says so to those whom that will surprise."""
        self._board.publish("waits/verdict", sentence)
        self.failed = CollectiveError(sentence)
        return self.failed

    def verdict(self) -> str:
        """What was concluded; empty where nothing was."""
        return self._board.collect_some(["waits/verdict"], 0.0).get("waits/verdict", b"").decode()

    def _read(self, ranks: set[int]) -> dict[int, BlockedCall]:
        keys = {f"waits/{rank}": rank for rank in ranks}
        found = self._board.collect_some(list(keys), 0.0) if keys else {}
        return {keys[key]: BlockedCall(*json.loads(text)) for key, text in found.items()}


class Wait:
    """One wait: a context, in which `look` is called each second that it lasts."""

    def __init__(self, graph: WaitGraph, group: str, number: int, what: object) -> None:
        self._graph, self._group, self._number, self._what = graph, group, number, what
        self._published = False
        self._seen: dict[int, BlockedCall] = {}

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A rank that gives up leaves its row: the others may rely on it. It says why, where others know."""
        if not self._published:
            return
        if kind is None:
            self._graph.withdraw()
        elif issubclass(kind, RuntimeError) and (sentence := self._graph.verdict()):
            raise CollectiveError(sentence) from None

    def look(self) -> None:
        """Raises `CollectiveError` where ranks wait for each other, now and before, or another group failed."""
        if self._graph.failed is not None:
            raise self._graph.failed
        if not self._published:
            self._graph.publish(self._group, self._number, self._what)
            self._published = True
            return
        found = self._graph.cycle()
        if found and found == self._seen:
            raise self._graph.conclude(deadlock(found))
        self._seen = found


def deadlock(found: Mapping[int, BlockedCall]) -> str:
    """The sentence that names who waits in what."""
    waits = "; ".join(f"rank {rank} waits in {row.what}" for rank, row in sorted(found.items())[:NAMED])
    return (
        f"ranks wait for each other: {waits}: ranks that share groups must make their calls in the same order; make "
        "the orders alike"
    )
