"""`CollectiveTable`: one algorithm for one collective and one number of ranks, as rows of steps, a row a rank.

Every rank has cells, each as long as a chunk of the vector. In a step a rank posts all its messages at once; what it
sends is read when the step begins. When all of them are through, what arrived is written (or added) in the order of
`receives`, then the moves between its own cells are done, their reads before their writes. The n-th message from one
rank to another is the n-th that the other expects from it. Nothing else keeps ranks in step.

Generators write `Transfer`s, which say both ends; `table_of` turns them into rows. Executor, checker and cost walk read
the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, NamedTuple

from shoal.errors import LayoutError

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"]
OWNED: frozenset[Kind] = frozenset({"reduce_scatter", "all_gather", "all_to_all"})
"""Collectives in which chunk c belongs to rank c, so that there are as many chunks as ranks, all of one length."""


class Transfer(NamedTuple):
    """Cell `read` of `source` goes into cell `write` of `target`, added to what is there or in its place."""

    source: int
    target: int
    read: int
    write: int
    reduce: bool = False


class Send(NamedTuple):
    """One message: these cells, one after the other."""

    to: int
    cells: tuple[int, ...]


class Receive(NamedTuple):
    """One message from `source` into these cells."""

    source: int
    cells: tuple[int, ...]
    reduce: bool


class Move(NamedTuple):
    """From one cell of a rank to another of the same rank."""

    read: int
    write: int
    reduce: bool


class Step(NamedTuple):
    """What one rank does at once."""

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class CollectiveTable:
    """`rows[rank][step]`; all rows are equally long.

    Cells 0 to `chunks` - 1 are the vector: what is reduced in place, the gathered result, or the input of an
    all-to-all, whose output is the next `chunks` cells. Further cells are scratch. Cell c is as long as chunk
    c modulo `chunks`. `root` matters to broadcast and reduce.
    """

    name: str
    kind: Kind
    ranks: int
    chunks: int
    cells: int
    rows: tuple[tuple[Step, ...], ...]
    root: int = 0

    @property
    def steps(self) -> int:
        """Length of every row."""
        return len(self.rows[0])


def table_of(
    name: str, kind: Kind, *, ranks: int, chunks: int, steps: Iterable[Sequence[Transfer]], cells: int = 0
) -> CollectiveTable:
    """Rows of `steps`. Transfers between the same two ranks in one step travel as one message."""
    columns = [_column(ranks, step) for step in steps if step]
    rows = tuple(tuple(column[rank] for column in columns) for rank in range(ranks))
    return CollectiveTable(name, kind, ranks, chunks, cells or chunks, rows)


def _column(ranks: int, transfers: Sequence[Transfer]) -> list[Step]:
    """One step of all ranks."""
    messages: dict[tuple[int, int, bool], list[Transfer]] = defaultdict(list)
    moves: list[list[Move]] = [[] for _ in range(ranks)]
    for transfer in transfers:
        if transfer.source == transfer.target:
            moves[transfer.source].append(Move(transfer.read, transfer.write, transfer.reduce))
        else:
            messages[transfer.source, transfer.target, transfer.reduce].append(transfer)
    sends: list[list[Send]] = [[] for _ in range(ranks)]
    receives: list[list[Receive]] = [[] for _ in range(ranks)]
    for (source, target, reduce), parts in sorted(messages.items()):
        sends[source].append(Send(target, tuple(part.read for part in parts)))
        receives[target].append(Receive(source, tuple(part.write for part in parts), reduce))
    return [Step(tuple(sends[r]), tuple(receives[r]), tuple(moves[r])) for r in range(ranks)]


def relabelled(table: CollectiveTable, order: Sequence[int]) -> CollectiveTable:
    """The same algorithm with rank `order[p]` in the place of rank p. The root becomes `order[0]` where it was 0."""
    if sorted(order) != list(range(table.ranks)):
        raise LayoutError(f"order {list(order)}: it has to name each of {table.ranks} ranks once; sort it out")
    if list(order) == list(range(table.ranks)):
        return table

    def cell(number: int) -> int:
        if table.kind not in OWNED:
            return number
        slot, chunk = divmod(number, table.chunks)
        return slot * table.chunks + order[chunk]

    def step(old: Step) -> Step:
        return Step(
            tuple(Send(order[to], tuple(map(cell, cells))) for to, cells in old.sends),
            tuple(Receive(order[source], tuple(map(cell, cells)), add) for source, cells, add in old.receives),
            tuple(Move(cell(read), cell(write), add) for read, write, add in old.moves),
        )

    rows: list[tuple[Step, ...]] = [()] * table.ranks
    for place, row in enumerate(table.rows):
        rows[order[place]] = tuple(map(step, row))
    return replace(table, rows=tuple(rows), root=order[table.root])


# Phases: steps of transfers that algorithms are put together from.
#
# A reduce-scatter among `members` leaves the sum of `parts[i]` (some cells) with member i. Played backwards, with
# copies for additions, it is an all-gather; a reduce played backwards is a broadcast. So each exists once.


Phase = list[list[Transfer]]
Parts = Sequence[Sequence[int]]


def added(source: int, target: int, cells: Sequence[int]) -> list[Transfer]:
    """`cells` of `source` are added to the same cells of `target`."""
    return [Transfer(source, target, cell, cell, True) for cell in cells]


def copied(source: int, target: int, cells: Sequence[int]) -> list[Transfer]:
    """`cells` of `source` replace the same cells of `target`."""
    return [Transfer(source, target, cell, cell) for cell in cells]


def backwards(phase: Phase) -> Phase:
    """What was collected is handed out, along the same links in the other direction."""
    return [[Transfer(t.target, t.source, t.write, t.read) for t in step] for step in reversed(phase)]


def side_by_side(*phases: Phase) -> Phase:
    """Phases that run at the same time, step beside step."""
    return [[transfer for step in steps for transfer in step] for steps in zip_longest(*phases, fillvalue=[])]


def ring_reduce_scatter(members: Sequence[int], parts: Parts) -> Phase:
    """n - 1 steps; each part travels once around and ends with its owner."""
    n = len(members)
    return [
        [t for i in range(n) for t in added(members[i], members[(i + 1) % n], parts[(i - step - 1) % n])]
        for step in range(n - 1)
    ]


def ring_all_gather(members: Sequence[int], parts: Parts) -> Phase:
    """n - 1 steps in the direction of the reduce-scatter: a ring that runs backwards, played backwards."""
    return backwards(ring_reduce_scatter(members[::-1], parts[::-1]))


def halving(members: Sequence[int], parts: Parts) -> Phase:
    """Recursive halving among 2^k members: partners at distance n/2, n/4, ... 1 swap the half the other one keeps."""
    phase, distance = [], len(members) // 2
    while distance:
        phase.append([t for i in range(len(members)) for t in _half(members, parts, i, distance)])
        distance //= 2
    return phase


def _half(members: Sequence[int], parts: Parts, i: int, distance: int) -> list[Transfer]:
    partner = i ^ distance
    first = partner // distance * distance
    cells = [cell for part in parts[first : first + distance] for cell in part]
    return added(members[i], members[partner], cells)
