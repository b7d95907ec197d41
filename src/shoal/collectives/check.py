"""Whether a table is the collective that it says: what every rank has at the end, proved by playing it with symbols.

Each contribution is in each result once, every message is sent and expected, no rank waits for ever, and all ranks that
get a sum get the same sum of the same sums, which are the same bits.

The play has synchronous sends. That covers eager ones: every receive names its source and takes that one's messages in
order, so what arrives does not depend on when, and a rank that waits for less is never later.
"""

from __future__ import annotations

from shoal.collectives.play import Content, Play, State
from shoal.collectives.table import OWNED, CollectiveTable, Step
from shoal.errors import LayoutError


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
