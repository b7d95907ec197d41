"""Plays a table with symbols for numbers, rank by rank, as messages allow.

A cell holds `Content`: which chunk, whose contributions (a bit a rank), and which sum of which sums it is. With
synchronous sends a message is through when the other rank has come to expect it, with eager ones when it was posted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.collectives.table import OWNED, CollectiveTable, Receive, Step
from shoal.errors import LayoutError


class Content(NamedTuple):
    """Chunk `chunk`, summed over the ranks in the bits of `ranks`; equal `order`s are the same sum, bit for bit."""

    chunk: int
    ranks: int
    order: int


State = dict[int, Content]
Message = list[Content]
Channel = tuple[int, int]


@dataclass
class Play:
    """`states[rank][cell]`, to begin with what the ranks have; after `run`, what the table made of it."""

    table: CollectiveTable
    states: list[State]
    synchronous: bool
    at: list[int] = field(default_factory=list)
    _pending: list[int] = field(default_factory=list)
    _sums: dict[tuple[int, int], int] = field(default_factory=dict)

    def run(self) -> None:
        """Raises `LayoutError` where ranks wait for ever, messages do not fit, or a sum is wrong."""
        ranks = self.table.ranks
        self.at, self._pending = [-1] * ranks, [0] * ranks
        self._sent: dict[Channel, deque[Message]] = {}
        self._expected: dict[Channel, deque[int]] = {}
        self._arrived: list[dict[int, Message]] = [{} for _ in range(ranks)]
        self._free = deque(range(ranks))
        self._uneven = self.table.kind not in OWNED
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
        # one more than there are, so that the step cannot end before all of its messages are posted
        self._pending[rank] = 1 + len(step.receives) + (len(step.sends) if self.synchronous else 0)
        self._post(rank, step)
        self._done(rank)

    def _post(self, rank: int, step: Step) -> None:
        state = self.states[rank]
        for to, cells in step.sends:
            try:
                message = [state[cell] for cell in cells]
            except KeyError as error:
                raise self._unwritten(rank, error.args[0]) from None
            if expected := self._expected.get((rank, to)):
                self._deliver(rank, to, expected.popleft(), message)
            else:
                self._sent.setdefault((rank, to), deque()).append(message)
        for index, receive in enumerate(step.receives):
            if sent := self._sent.get((receive.source, rank)):
                self._deliver(receive.source, rank, index, sent.popleft())
            else:
                self._expected.setdefault((receive.source, rank), deque()).append(index)

    def _deliver(self, source: int, target: int, index: int, message: Message) -> None:
        self._arrived[target][index] = message
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
        if step.moves:
            read = [self._held(rank, move.read) for move in step.moves]
            for move, content in zip(step.moves, read, strict=True):
                self.states[rank][move.write] = self._sum(rank, move.write, content) if move.reduce else content

    def _receive(self, rank: int, receive: Receive, message: Message) -> None:
        if len(message) != len(receive.cells):
            raise LayoutError(
                f"{self.table.name}: rank {rank} expects {len(receive.cells)} cells from rank {receive.source} in step "
                f"{self.at[rank]}, and {len(message)} come; a message has as many cells at both ends"
            )
        for cell, content in zip(receive.cells, message, strict=True):
            if self._uneven and content.chunk != cell % self.table.chunks:
                raise LayoutError(
                    f"{self._where(rank, cell)} chunk {content.chunk} comes from rank {receive.source}; chunks are not "
                    "equally long, so each keeps to its own cells"
                )
        if receive.reduce:
            message = [self._sum(rank, cell, new) for cell, new in zip(receive.cells, message, strict=True)]
        self.states[rank].update(zip(receive.cells, message, strict=True))

    def _sum(self, rank: int, cell: int, new: Content) -> Content:
        old = self._held(rank, cell)
        if old.chunk != new.chunk:
            raise LayoutError(
                f"{self._where(rank, cell)} chunk {new.chunk} is added to chunk {old.chunk}; only equal ones can be"
            )
        if old.ranks & new.ranks:
            raise LayoutError(
                f"{self._where(rank, cell)} what ranks {_named(old.ranks & new.ranks)} contributed is added twice; "
                "take one out"
            )
        pair = (min(old.order, new.order), max(old.order, new.order))
        order = self._sums.setdefault(pair, self.table.ranks + len(self._sums))
        return Content(old.chunk, old.ranks | new.ranks, order)

    def _where(self, rank: int, cell: int) -> str:
        return f"{self.table.name}: rank {rank}, step {self.at[rank]}, cell {cell}:"

    def _held(self, rank: int, cell: int) -> Content:
        if cell not in self.states[rank]:
            raise self._unwritten(rank, cell)
        return self.states[rank][cell]

    def _unwritten(self, rank: int, cell: int) -> LayoutError:
        return LayoutError(
            f"{self.table.name}: rank {rank} reads cell {cell} in step {self.at[rank]}, which holds nothing yet; write "
            "it first"
        )

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
