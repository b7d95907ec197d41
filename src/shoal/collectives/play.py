"""Plays a table with symbols for numbers, rank by rank, as messages allow.

A cell holds `Content`: which chunk, whose contributions (a bit a rank), and which sum of which sums it is. With
synchronous sends a message is through when the other rank has come to expect it, with eager ones when it was posted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.collectives.table import Move, Receive, Step, Table
from shoal.errors import LayoutError


class Content(NamedTuple):
    """Chunk `chunk`, summed over the ranks in the bits of `ranks`; equal `order`s are the same sum, bit for bit."""

    chunk: int
    ranks: int
    order: int


State = dict[int, Content]
Channel = tuple[int, int]


@dataclass
class Play:
    """`states[rank][cell]`, to begin with what the ranks have; after `run`, what the table made of it."""

    table: Table
    states: list[State]
    synchronous: bool
    at: list[int] = field(default_factory=list)
    _pending: list[int] = field(default_factory=list)
    _sums: dict[tuple[int, int], int] = field(default_factory=dict)

    def run(self) -> None:
        """Raises `LayoutError` where ranks wait for ever, messages do not fit, or a sum is wrong."""
        ranks = self.table.ranks
        self.at, self._pending = [-1] * ranks, [0] * ranks
        self._sent: dict[Channel, deque[tuple[Content, ...]]] = defaultdict(deque)
        self._expected: dict[Channel, deque[int]] = defaultdict(deque)
        self._arrived: list[dict[int, tuple[Content, ...]]] = [{} for _ in range(ranks)]
        self._free = deque(range(ranks))
        while self._free:
            self._advance(self._free.popleft())
        self._check_end()

    def _advance(self, rank: int) -> None:
        """Finishes a rank's step and posts the messages of its next."""
        row = self.table.rows[rank]
        if self.at[rank] >= 0:
            self._finish(rank, row[self.at[rank]])
        self.at[rank] += 1
        if self.at[rank] == len(row):
            return
        step = row[self.at[rank]]
        self._pending[rank] = len(step.receives) + (len(step.sends) if self.synchronous else 0)
        for to, cells in step.sends:
            self._sent[rank, to].append(tuple(self._held(rank, cell) for cell in cells))
        for index, receive in enumerate(step.receives):
            self._expected[receive.source, rank].append(index)
        if not self._pending[rank]:
            self._free.append(rank)
        for channel in [(rank, send.to) for send in step.sends] + [(r.source, rank) for r in step.receives]:
            self._match(channel)

    def _match(self, channel: Channel) -> None:
        sent, expected = self._sent[channel], self._expected[channel]
        source, target = channel
        while sent and expected:
            self._arrived[target][expected.popleft()] = sent.popleft()
            self._done(target)
            if self.synchronous:
                self._done(source)

    def _done(self, rank: int) -> None:
        self._pending[rank] -= 1
        if not self._pending[rank]:
            self._free.append(rank)

    def _finish(self, rank: int, step: Step) -> None:
        for index, receive in enumerate(step.receives):
            self._receive(rank, receive, self._arrived[rank].pop(index))
        read = [self._held(rank, move.read) for move in step.moves]
        for move, content in zip(step.moves, read, strict=True):
            self._write(rank, move, content)

    def _receive(self, rank: int, receive: Receive, contents: tuple[Content, ...]) -> None:
        if len(contents) != len(receive.cells):
            raise LayoutError(
                f"{self.table.name}: rank {rank} expects {len(receive.cells)} cells from rank {receive.source} in step "
                f"{self.at[rank]}, and {len(contents)} come; a message has as many cells at both ends"
            )
        for cell, content in zip(receive.cells, contents, strict=True):
            self._write(rank, Move(-1, cell, receive.reduce), content)

    def _write(self, rank: int, move: Move, content: Content) -> None:
        if move.reduce:
            content = self._sum(rank, move.write, content)
        self.states[rank][move.write] = content

    def _sum(self, rank: int, cell: int, new: Content) -> Content:
        old = self._held(rank, cell)
        where = f"{self.table.name}: rank {rank}, step {self.at[rank]}, cell {cell}"
        if old.chunk != new.chunk:
            raise LayoutError(f"{where}: chunk {new.chunk} is added to chunk {old.chunk}; only equal ones can be")
        if old.ranks & new.ranks:
            raise LayoutError(
                f"{where}: what ranks {_named(old.ranks & new.ranks)} contributed is added twice; take one out"
            )
        pair = (min(old.order, new.order), max(old.order, new.order))
        order = self._sums.setdefault(pair, self.table.ranks + len(self._sums))
        return Content(old.chunk, old.ranks | new.ranks, order)

    def _held(self, rank: int, cell: int) -> Content:
        try:
            return self.states[rank][cell]
        except KeyError:
            raise LayoutError(
                f"{self.table.name}: rank {rank} reads cell {cell} in step {self.at[rank]}, which holds nothing yet; "
                "write it first"
            ) from None

    def _check_end(self) -> None:
        stuck = [rank for rank, at in enumerate(self.at) if at < len(self.table.rows[rank])]
        if stuck:
            where = ", ".join(f"rank {rank} in step {self.at[rank]}" for rank in stuck[:8])
            raise LayoutError(
                f"{self.table.name}: ranks wait for ever ({where}); every message has to be sent and expected in the "
                "same order by both"
            )
        lost = [channel for channel, messages in self._sent.items() if messages]
        if lost:
            source, target = lost[0]
            raise LayoutError(
                f"{self.table.name}: rank {source} sends to rank {target} what rank {target} never expects; take the "
                "send out or receive it"
            )


def _named(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
