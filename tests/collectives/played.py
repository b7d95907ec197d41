"""Whether a table is the collective that it says: what every rank has at the end, proved by playing it with symbols.

Each contribution is in each result once, every message is sent and expected, no rank waits for ever, and all ranks that
get a sum get the same sum of the same sums, which are the same bits.

The play has synchronous sends. That covers eager ones: every receive names its source and takes that one's messages in
order, so what arrives does not depend on when, and a rank that waits for less is never later.

Plays a table with symbols for numbers, rank by rank, as messages allow.

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


def check(table: CollectiveTable) -> None:
    """Raises `LayoutError` where the table is wrong; the sentence names the rank and the cell."""
    _check_shape(table)
    play = begun(table, synchronous=True)
    play.run()
    _check_results(table, play.states)


def begun(table: CollectiveTable, *, synchronous: bool) -> Play:
    """A play of the table in which every rank has what the collective starts from."""
    return Play(table, [_begin(table, rank) for rank in range(table.ranks)], synchronous)


def _check_shape(table: CollectiveTable) -> None:
    if table.kind in OWNED and table.chunks != table.ranks:
        raise LayoutError(
            f"{table.name}: {table.kind} of {table.ranks} ranks has {table.chunks} chunks; it needs one a rank"
        )
    for rank, row in enumerate(table.rows):
        used = {cell for step in row for _, cells in step.sends for cell in cells}
        used |= {cell for step in row for _, cells, _ in step.receives for cell in cells}
        used |= {cell for step in row for move in step.moves for cell in move[:2]}
        if not used <= set(range(table.cells)):
            raise LayoutError(
                f"{table.name}: rank {rank} uses cell {max(used)}, and there are {table.cells}; count them from 0"
            )
        for number, step in enumerate(row):
            _check_writes(table, rank, number, step)


def _check_writes(table: CollectiveTable, rank: int, number: int, step: Step) -> None:
    """What replaces a cell may arrive at any time in the step, so nothing else of the step may write there."""
    written: set[int] = set()
    copies_first = sorted(step.receives, key=lambda receive: receive.reduce) if len(step.receives) > 1 else ()
    for receive in copies_first:
        twice = written.intersection(receive.cells)
        if twice:
            raise LayoutError(
                f"{table.name}: rank {rank} gets cell {min(twice)} more than once in step {number}, in no certain "
                "order; use two steps"
            )
        if not receive.reduce:
            written.update(receive.cells)


def _begin(table: CollectiveTable, rank: int) -> State:
    """What a rank has before the collective."""
    if table.kind == "all_gather":
        held = [rank]
    elif table.kind == "broadcast" and rank != table.root:
        held = []
    else:
        held = list(range(table.chunks))
    return {cell: Content(cell, 1 << rank, rank) for cell in held}


def _end(table: CollectiveTable, rank: int) -> dict[int, tuple[int, int]]:
    """What a rank must have after it: (chunk, ranks) by cell."""
    everyone, chunks = (1 << table.ranks) - 1, range(table.chunks)
    match table.kind:
        case "all_reduce":
            return {cell: (cell, everyone) for cell in chunks}
        case "reduce":
            return {cell: (cell, everyone) for cell in chunks if rank == table.root}
        case "reduce_scatter":
            return {rank: (rank, everyone)}
        case "all_gather":
            return {cell: (cell, 1 << cell) for cell in chunks}
        case "broadcast":
            return {cell: (cell, 1 << table.root) for cell in chunks}
        case "all_to_all":  # the input is still there, and the output follows it
            return {cell: (cell, 1 << rank) for cell in chunks} | {table.chunks + i: (rank, 1 << i) for i in chunks}


def _check_results(table: CollectiveTable, states: list[State]) -> None:
    orders: dict[int, int] = {}
    for rank, state in enumerate(states):
        for cell, (chunk, ranks) in _end(table, rank).items():
            content = state.get(cell)
            if content is None or (content.chunk, content.ranks) != (chunk, ranks):
                raise LayoutError(
                    f"{table.name}: rank {rank} ends with {_said(content)} in cell {cell}; {table.kind} wants "
                    f"{_said(Content(chunk, ranks, 0))} there"
                )
            if table.kind == "all_reduce" and orders.setdefault(cell, content.order) != content.order:
                raise LayoutError(
                    f"{table.name}: rank {rank} adds chunk {cell} in another order than rank 0, so their bits differ; "
                    "add it in one place and hand it out, or in one order everywhere"
                )


def _said(content: Content | None) -> str:
    if content is None:
        return "nothing"
    ranks = [rank for rank in range(content.ranks.bit_length()) if content.ranks >> rank & 1]
    return f"chunk {content.chunk} of ranks {ranks}"
