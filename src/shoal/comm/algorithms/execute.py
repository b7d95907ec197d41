"""Runs a table of `shoal.collectives` on live ranks, over `send` and `recv` of a `Collective`.

A step posts all its messages and then waits for them; ranks meet in no other way. `Cells` are the numbered cells of a
table as slices of flat tensors. Sums are made in the order of the table, the lower rank's number first, so that every
run gives the same bits, and an all-reduce the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.collectives.table import CollectiveTable, Kind, Move, Receive, Step
from shoal.comm.collective import Collective, Handle, Reduction
from shoal.errors import CollectiveError, LayoutError

_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Cells:
    """`flats` are one-dimensional and equally long; each has `chunks` cells, as equal as its length allows."""

    def __init__(self, flats: Sequence[Tensor], chunks: int, op: Reduction = "sum") -> None:
        self._flats, self._chunks, self._combine = flats, chunks, _COMBINE[op]
        short, longer = divmod(flats[0].numel(), chunks)
        self._bounds = [chunk * short + min(chunk, longer) for chunk in range(chunks + 1)]

    def span(self, cells: Sequence[int]) -> Tensor | None:
        """A view of these cells, where they lie one after the other."""
        flat, first = divmod(cells[0], self._chunks)
        last = first + len(cells) - 1
        if last >= self._chunks or any(cell != cells[0] + i for i, cell in enumerate(cells)):
            return None
        return self._flats[flat][self._bounds[first] : self._bounds[last + 1]]

    def read(self, cells: Sequence[int]) -> Tensor:
        """Their content: a view where they lie one after the other, else a copy."""
        view = self.span(cells)
        return torch.cat([self.view(cell) for cell in cells]) if view is None else view

    def view(self, cell: int) -> Tensor:
        """One cell."""
        flat, chunk = divmod(cell, self._chunks)
        return self._flats[flat][self._bounds[chunk] : self._bounds[chunk + 1]]

    def empty(self, cells: Sequence[int]) -> Tensor:
        """Room for the content of these cells."""
        sizes = (self._bounds[cell % self._chunks + 1] - self._bounds[cell % self._chunks] for cell in cells)
        return self._flats[0].new_empty(sum(sizes))

    def write(self, cells: Sequence[int], content: Tensor) -> None:
        """Replaces them."""
        for target, part in self._parts(cells, content):
            target.copy_(part)

    def add(self, cells: Sequence[int], content: Tensor, *, first: bool) -> None:
        """Reduces `content` into them; `first` says that it is the first operand, for results that depend on it."""
        for target, part in self._parts(cells, content):
            self._combine(*((part, target) if first else (target, part)), out=target)

    def _parts(self, cells: Sequence[int], content: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views to write, with what goes there."""
        whole = self.span(cells)
        if whole is not None:
            return [(whole, content)]
        targets = [self.view(cell) for cell in cells]
        return list(zip(targets, content.split([target.numel() for target in targets]), strict=True))


class _Arrival(NamedTuple):
    """A message under way; `direct` where it goes into its cells without a stop."""

    receive: Receive
    content: Tensor
    direct: bool
    handle: Handle


def all_reduce(
    tensor: Tensor, table: CollectiveTable, group: Collective, *, op: Reduction = "sum", tag: int = 0
) -> None:
    """`tensor`, of any shape and the same on each rank, becomes the reduction over all ranks."""
    _in_place(tensor, _fitting(table, "all_reduce", group), group, op=op, tag=tag)


def reduce(tensor: Tensor, table: CollectiveTable, group: Collective, *, op: Reduction = "sum", tag: int = 0) -> None:
    """`tensor` of the table's root becomes the reduction; the others keep partial ones."""
    _in_place(tensor, _fitting(table, "reduce", group), group, op=op, tag=tag)


def broadcast(tensor: Tensor, table: CollectiveTable, group: Collective, *, tag: int = 0) -> None:
    """`tensor` becomes that of the table's root."""
    _in_place(tensor, _fitting(table, "broadcast", group), group, op="sum", tag=tag)


def reduce_scatter(
    output: Tensor, input: Tensor, table: CollectiveTable, group: Collective, *, op: Reduction = "sum", tag: int = 0
) -> None:
    """`output` [n / size, ...] becomes this rank's part of the reduction of `input` [n, ...], which is kept."""
    _check_lengths(input, output, group)
    work = input.detach().clone().reshape(-1)
    cells = Cells([work], _fitting(table, "reduce_scatter", group).chunks, op)
    run(table, cells, group, tag=tag)
    output.copy_(cells.view(group.rank).view_as(output))


def all_gather(output: Tensor, input: Tensor, table: CollectiveTable, group: Collective, *, tag: int = 0) -> None:
    """`output` [size * n, ...] becomes every rank's `input` [n, ...], in rank order."""
    _check_lengths(output, input, group)
    flat = output.detach().contiguous().view(-1)
    cells = Cells([flat], _fitting(table, "all_gather", group).chunks)
    cells.write([group.rank], input.detach().reshape(-1))
    run(table, cells, group, tag=tag)
    _settle(output, flat)


def all_to_all(output: Tensor, input: Tensor, table: CollectiveTable, group: Collective, *, tag: int = 0) -> None:
    """Part i of `input` goes to rank i, part j of `output` comes from rank j; all parts are equal."""
    if input.numel() != output.numel() or input.numel() % group.size:
        raise CollectiveError(
            f"all_to_all of {input.numel()} into {output.numel()} numbers among {group.size} ranks: both have "
            "to be the same multiple of the ranks; pad them"
        )
    flat = output.detach().contiguous().view(-1)
    cells = Cells([input.detach().reshape(-1), flat], _fitting(table, "all_to_all", group).chunks)
    run(table, cells, group, tag=tag)
    _settle(output, flat)


def run(table: CollectiveTable, cells: Cells, group: Collective, *, tag: int = 0) -> None:
    """This rank's row. Messages of step s have tag `tag` + s. Raises what `group` raises where a rank is missing."""
    for index, step in enumerate(table.rows[group.rank]):
        _run_step(step, cells, group, tag + index)


def _run_step(step: Step, cells: Cells, group: Collective, tag: int) -> None:
    leaving = {cell for send in step.sends for cell in send.cells}
    contents = [(send.to, cells.read(send.cells)) for send in step.sends]
    # Receives first: a backend that tells the sender to begin over the same connection would tell it behind what this
    # rank sends there, and two ranks that exchange something would send one after the other.
    arrivals = [_expect(receive, cells, group, tag, leaving) for receive in step.receives]
    sent = [group.send(content, to=to, tag=tag) for to, content in contents if content.numel()]
    for handle in sent:
        handle.wait()
    for arrival in arrivals:
        arrival.handle.wait()
        _take(arrival, cells, group.rank)
    _move(step.moves, cells)


def _expect(receive: Receive, cells: Cells, group: Collective, tag: int, leaving: set[int]) -> _Arrival:
    """Straight into its cells, unless they are added to or are still being sent."""
    place = None if receive.reduce or leaving.intersection(receive.cells) else cells.span(receive.cells)
    content = cells.empty(receive.cells) if place is None else place
    handle = group.recv(content, source=receive.source, tag=tag) if content.numel() else _Nothing()
    return _Arrival(receive, content, place is not None, handle)


def _take(arrival: _Arrival, cells: Cells, rank: int) -> None:
    receive = arrival.receive
    if receive.reduce:
        cells.add(receive.cells, arrival.content, first=receive.source < rank)
    elif not arrival.direct:
        cells.write(receive.cells, arrival.content)


def _move(moves: tuple[Move, ...], cells: Cells) -> None:
    """Reads before writes; copies are made only where one cell is both."""
    contents = [cells.view(move.read) for move in moves]
    if {move.read for move in moves} & {move.write for move in moves}:
        contents = [content.clone() for content in contents]
    for move, content in zip(moves, contents, strict=True):
        if move.reduce:
            cells.add([move.write], content, first=False)
        else:
            cells.write([move.write], content)


class _Nothing:
    def wait(self) -> None:
        """Empty messages are not sent."""


def _in_place(tensor: Tensor, table: CollectiveTable, group: Collective, *, op: Reduction, tag: int) -> None:
    flat = tensor.detach().contiguous().view(-1)
    scratch = [flat.new_empty(flat.numel()) for _ in range(table.cells // table.chunks - 1)]
    run(table, Cells([flat, *scratch], table.chunks, op), group, tag=tag)
    _settle(tensor, flat)


def _settle(tensor: Tensor, flat: Tensor) -> None:
    """The result goes back where the tensor's own memory could not be used."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view_as(tensor))


def _fitting(table: CollectiveTable, kind: Kind, group: Collective) -> CollectiveTable:
    if table.kind != kind or table.ranks != group.size:
        raise LayoutError(
            f"{table.name} is a table for {table.kind} of {table.ranks} ranks, and was given to {kind} of {group.size}"
            "; make the one that is needed"
        )
    return table


def _check_lengths(whole: Tensor, part: Tensor, group: Collective) -> None:
    if whole.numel() != part.numel() * group.size:
        raise CollectiveError(
            f"{part.numel()} numbers a rank and {whole.numel()} in all: {group.size} ranks need {group.size} times as "
            "many in all; give tensors of those shapes"
        )
