"""Collectives on two levels, inside each host and between the leaders of hosts: what leaders send, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle, Reduction

# Ranks on hosts: which ranks share one, what their leaders send each other, and what that costs.
#
# The leader of a host is its first rank. Leaders send each piece straight to the host that needs it: the same bytes as
# a ring, in one step instead of m-1. The receiver sums hosts from left to right, 16-bit floats in float32: the same
# bits on all ranks and in every run.
#
# Bytes between hosts, of n ranks on m hosts with a payload of S bytes on each rank (all-gather: its input; the others:
# the whole vector), over all hosts, headers not counted. The ring is Gloo's, its neighbours numbered host by host:
#
#     operation         two levels          ring over all ranks      used
#     all_reduce        2 (m-1) S           2 m (n-1)/n S            two levels: n (m-1) / m (n-1) of the ring
#     reduce_scatter    (m-1) S             2 m (n-1)/n S (*)        two levels
#     all_gather        (m-1) n S           m (n-1) S                two levels
#     broadcast         (m-1) S             (m-1) S to (n-1) S       two levels
#     reduce            (m-1) S             about m (n-1)/n S        two levels
#     barrier           nothing to count                             two levels: m ranks meet, not n
#     gather, scatter   (n-g) S, g ranks beside the root             the same bytes; left to Gloo
#     all_to_all        blocks of two hosts are all different        the same bytes; left to Gloo
#     send, recv        S, or nothing inside a host                  shared memory inside a host, else Gloo
#
# (*) Gloo's reduce-scatter is an all-reduce and a slice. Where all neighbours in the ring are on different hosts, m
# becomes n. A leader's share of an all-reduce is 2 (m-1)/m S sent: the least that any algorithm needs of a host
# (Patarasuk and Yuan, JPDC 69(2), 2009, theorem 1, with hosts for ranks).


@dataclass(frozen=True)
class Division:
    """`hosts[h]` are the ranks of host h, ascending; hosts go by their first rank, which leads them."""

    hosts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(self.order)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ranks, host by host."""
        return tuple(rank for host in self.hosts for rank in host)

    @property
    def in_order(self) -> bool:
        """Whether ranks are numbered host by host."""
        return self.order == tuple(range(self.size))

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """For each rank its host, and its number within it."""
        return {rank: (h, i) for h, host in enumerate(self.hosts) for i, rank in enumerate(host)}

    def rows(self, host: int) -> slice:
        """Where the ranks of a host stand in `order`."""
        begin = sum(len(ranks) for ranks in self.hosts[:host])
        return slice(begin, begin + len(self.hosts[host]))


def division_of(hosts: Sequence[str]) -> Division:
    """From the identity of each rank's host, in rank order."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return Division(tuple(map(tuple, ranks.values())))


_TAG = 800_001
"""Of every exchange: messages between two leaders arrive in the order in which they were sent."""


@dataclass(frozen=True)
class Swap:
    """An exchange under way; it keeps the tensors that are being sent."""

    handles: Sequence[Handle]
    held: Sequence[Tensor]

    def wait(self) -> None:
        """Until all was sent and all has come."""
        for handle in self.handles:
            handle.wait()


def swap(leaders: Collective, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Swap:
    """`outgoing[h]` goes to host h, `incoming[h]` comes from there; contiguous, and empty where nothing is to be sent.

    A host's own places are left alone.
    """
    others = [host for host in range(leaders.size) if host != leaders.rank]
    handles = [leaders.recv(incoming[h], source=h, tag=_TAG) for h in others if incoming[h].numel()]
    handles += [leaders.send(outgoing[h], to=h, tag=_TAG) for h in others if outgoing[h].numel()]
    return Swap(handles, outgoing)


class Sum:
    """A reduction over hosts of a flat tensor, cut into a part for each host: `start`, `share`, `finish`.

    Afterwards every leader has the whole. `start` leaves the tensor as it is; it has to stay so until `share`.
    """

    def __init__(self, leaders: Collective, piece: Tensor, op: Reduction) -> None:
        self._leaders = leaders
        self._op: Reduction = op
        self._parts = piece.tensor_split(leaders.size)

    def start(self) -> None:
        """Sends every host its part."""
        own = self._parts[self._leaders.rank]
        self._others = room(own, self._leaders)
        self._under_way = swap(self._leaders, self._parts, self._others)

    def share(self) -> None:
        """Adds up the own part and sends it to every host."""
        self._under_way.wait()
        own = self._parts[self._leaders.rank]
        add_hosts(self._others, own, self._leaders.rank, self._op)
        self._under_way = swap(self._leaders, [own] * len(self._parts), self._parts)

    def finish(self) -> None:
        """Until the whole is here."""
        self._under_way.wait()


def room(own: Tensor, leaders: Collective) -> list[Tensor]:
    """For what comes from the other hosts, each as large as `own`."""
    return [own.new_empty(0 if host == leaders.rank else own.numel()) for host in range(leaders.size)]


def add_hosts(others: list[Tensor], own: Tensor, host: int, op: Reduction) -> None:
    """`own`, of host `host`, becomes the reduction of all; `others[h]` came from host h."""
    if own.numel():
        others[host] = own if host < 2 else own.clone()  # behind the first sum, `own` is no longer what it was
        combine(others, op, out=own)


_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_SHORT = (torch.float16, torch.bfloat16)


def combine(tensors: Sequence[Tensor], op: Reduction, *, out: Tensor) -> None:
    """Reduces two or more tensors of one shape from left to right. Sums of 16-bit floats are rounded once."""
    if op == "sum" and out.dtype in _SHORT:
        total = tensors[0].float()
        for tensor in tensors[1:]:
            total.add_(tensor)
        out.copy_(total)
        return
    left = tensors[0]
    for right in tensors[1:]:
        left = _COMBINE[op](left, right, out=out)


TWO_LEVELS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
"""The collectives that pay for two levels."""


# Collectives on two levels: inside each host over `mates`, between the leaders of hosts over `leaders`.
#
#     all_reduce       reduced to the leader, summed over hosts, broadcast
#     reduce           reduced to the leader, summed at the root's leader, sent to the root
#     reduce_scatter   reduced to the leader, each host's blocks summed there, scattered
#     all_gather       gathered at the leader, exchanged, broadcast
#     broadcast        inside the root's host, from its leader to the others, inside those
#
# Large tensors are cut into pieces, so that one piece travels between hosts while the next one is inside. Ranks of a
# host make the same calls in the same order. All tensors are flat, contiguous and not empty. `division` counts the
# bytes.


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
