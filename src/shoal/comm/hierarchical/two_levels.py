"""Collectives on two levels: inside each host over `mates`, between the leaders of hosts over `leaders`.

    all_reduce       reduced to the leader, summed over hosts, broadcast
    reduce           reduced to the leader, summed at the root's leader, sent to the root
    reduce_scatter   reduced to the leader, each host's blocks summed there, scattered
    all_gather       gathered at the leader, exchanged, broadcast
    broadcast        inside the root's host, from its leader to the others, inside those

Large tensors are cut into pieces, so that one piece travels between hosts while the next one is inside. Ranks of a host
make the same calls in the same order. All tensors are flat, contiguous and not empty. `division` counts the bytes.
"""

from __future__ import annotations

from torch import Tensor

from shoal.comm.collective import Collective, Handle, Reduction
from shoal.comm.hierarchical.division import Division, Sum, add_hosts, room, swap

PIECE_BYTES = 2 << 20
"""Some 2 ms at 10 Gbit/s: long beside the latency of a network, short beside a large message."""
_HANDED_ON = 800_002


class TwoLevels:
    """One rank's side. `mates` are the ranks of its host in ascending order; `leaders` is None on all but the first.

    Every method returns when this rank's part is done and its result in place.
    """

    def __init__(self, rank: int, division: Division, mates: Collective, leaders: Collective | None) -> None:
        self._rank, self._division, self._mates, self._leaders = rank, division, mates, leaders
        self._host = division.places[rank][0]

    def all_reduce(self, flat: Tensor, op: Reduction, divide_by: int = 1) -> None:
        """`flat` becomes the reduction over all ranks, over `divide_by` where that is not 1."""
        pieces = _pieces(flat)
        inside = [self._mates.reduce(piece, op) for piece in pieces]
        if self._leaders is None:
            outside = [self._mates.broadcast(piece) for piece in pieces]
        else:
            outside = self._between_leaders(self._leaders, pieces, inside, op, divide_by)
        _wait(inside)
        _wait(outside)

    def reduce(self, flat: Tensor, op: Reduction, *, root: int) -> None:
        """`flat` of the root becomes the reduction; the others' content is undefined afterwards."""
        self._mates.reduce(flat, op).wait()
        root_host, place = self._division.places[root]
        if self._leaders is not None:
            here, nothing = self._host == root_host, flat[:0]
            incoming = room(flat if here else nothing, self._leaders)
            outgoing = [flat if h == root_host and not here else nothing for h in range(self._leaders.size)]
            swap(self._leaders, outgoing, incoming).wait()
            if here:
                add_hosts(incoming, flat, self._host, op)
        if self._host == root_host and place != 0:
            self._hand_on(flat, place)

    def reduce_scatter(self, output: Tensor, flat: Tensor, op: Reduction) -> None:
        """`output` becomes this rank's part of the reduction of `flat`, which is used up."""
        self._mates.reduce(flat, op).wait()
        blocks: list[Tensor] = []
        if self._leaders is not None:
            rows = self._by_host(flat.view(self._division.size, output.numel()))
            parts = [rows[self._division.rows(h)].view(-1) for h in range(self._leaders.size)]
            own = parts[self._host]
            incoming = room(own, self._leaders)
            swap(self._leaders, parts, incoming).wait()
            add_hosts(incoming, own, self._host, op)
            blocks = list(own.chunk(self._mates.size)) if own.numel() else [own] * self._mates.size
        self._mates.scatter(output, blocks).wait()

    def all_gather(self, output: Tensor, block: Tensor) -> None:
        """`output` becomes every rank's `block`, in rank order."""
        division, whole = self._division, output
        if not division.in_order:
            whole = output.new_empty(output.numel())
        rows = whole.view(division.size, block.numel())
        own = rows[division.rows(self._host)]
        self._mates.gather(list(own) if self._leaders is not None else [], block).wait()
        if self._leaders is not None:
            hosts = range(self._leaders.size)
            flat = [rows[division.rows(h)].view(-1) for h in hosts]
            swap(self._leaders, [own.view(-1)] * len(hosts), flat).wait()
        _wait([self._mates.broadcast(piece) for piece in _pieces(whole)])
        if whole is not output:
            output.view_as(rows)[list(division.order)] = rows

    def broadcast(self, flat: Tensor, *, root: int) -> None:
        """`flat` becomes that of the root."""
        root_host, place = self._division.places[root]
        pieces, here = _pieces(flat), self._host == root_host
        inside = [self._mates.broadcast(piece, root=place) for piece in pieces] if here else []
        outside: list[Handle] = []
        if self._leaders is not None:
            for index, piece in enumerate(pieces):
                if here:
                    inside[index].wait()
                outside.append(self._leaders.broadcast(piece, root=root_host))
        if not here:
            for index, piece in enumerate(pieces):
                if outside:
                    outside[index].wait()
                inside.append(self._mates.broadcast(piece))
        _wait(inside)
        _wait(outside)

    def barrier(self) -> None:
        """Returns when all ranks have come."""
        self._mates.barrier().wait()
        if self._leaders is not None:
            self._leaders.barrier().wait()
        self._mates.barrier().wait()

    def _between_leaders(
        self, leaders: Collective, pieces: list[Tensor], inside: list[Handle], op: Reduction, divide_by: int
    ) -> list[Handle]:
        """Stage k starts piece k, shares out piece k-1 and hands on piece k-2: each waits behind the others' work."""
        sums, outside = [Sum(leaders, piece, op) for piece in pieces], []
        for stage in range(len(pieces) + 2):
            if stage < len(pieces):
                inside[stage].wait()
                sums[stage].start()
            if 0 <= stage - 1 < len(pieces):
                sums[stage - 1].share()
            if stage >= 2:
                sums[stage - 2].finish()
                if divide_by != 1:
                    pieces[stage - 2].div_(divide_by)
                outside.append(self._mates.broadcast(pieces[stage - 2]))
        return outside

    def _hand_on(self, flat: Tensor, place: int) -> None:
        """From the leader to the root, of one host."""
        if self._mates.rank == 0:
            self._mates.send(flat, to=place, tag=_HANDED_ON).wait()
        elif self._mates.rank == place:
            self._mates.recv(flat, source=0, tag=_HANDED_ON).wait()

    def _by_host(self, rows: Tensor) -> Tensor:
        return rows if self._division.in_order else rows[list(self._division.order)]


def _pieces(flat: Tensor) -> list[Tensor]:
    return list(flat.split(max(1, PIECE_BYTES // flat.element_size())))


def _wait(handles: list[Handle]) -> None:
    for handle in handles:
        handle.wait()
