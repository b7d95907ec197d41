"""What one rank sends in a collective, and to whom: closed forms of the algorithms that the backends run.

S is `payload`: the bytes that a rank contributes (all-reduce, broadcast, reduce, all-gather's input, send) or the whole
that is divided (reduce-scatter's and all-to-all's input, the root's input of a scatter). Of n ranks, rank r sends

    backend  operation         algorithm                              bytes, and to whom
    gloo     all_reduce        ring                                   2 (n-1)/n S to r-1
             reduce_scatter    ring all-reduce, of which a part is    2 (n-1)/n S to r-1
                               kept
             all_gather        ring                                   (n-1) S to r+1
             all_to_all        direct                                 S/n to each
             broadcast         binomial tree                          S to each of its children
             reduce            ring reduce-scatter, gathered at the   S - 2 min(S/2n, 1 MiB) to r-1, S/n to the root
                               root
             gather            direct                                 S to the root
             scatter           direct                                 S/n from the root to each
             send              direct                                 S
    shm      all_reduce        two shots (short ones take one, and   2 S/n to each
                               are counted alike)
             reduce_scatter    one shot                               S/n to each
             reduce            two shots                              S/n to each, and S/n to the root
             the others        direct                                 as above; a broadcast: S from the root to each

Gloo's were read off the connections of two to four ranks, each on a host of its own (`tests/comm/test_volume.py` does
it again): whatever the size its all-reduce is a ring, and its reduce sends more than a ring has to where S exceeds
2n MiB, because it works in segments of at most 1 MiB. Through memory ("shm") nothing is sent: what is counted is what a
rank moves to others or others take from it. NCCL is counted as rings, MPI's as the least that there is: what they
choose is theirs.

What two levels and tables leave to Gloo (reductions and dtypes that they have not, all-gathers of lists) is counted as
Gloo's; what the core in C leaves to it, as the core's.

What is not counted: 48 bytes of Gloo's own before each message, two such messages to arrange each, barriers, and the
headers of TCP, IP and Ethernet (`wire_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.collectives.table import CollectiveTable
from shoal.comm.ledger import Sent
from shoal.comm.two_levels import Division, division_of

Traffic = Mapping[int, int]
"""Bytes by the rank that they go to."""

Tables = Callable[[str, int, int], CollectiveTable | None]
OwnAlgorithm = Callable[[str, Sequence[Any], Any], bool]
"""Whether a backend makes an operation of these tensors, with this reduction (or None), by an algorithm of its own."""

SEGMENT_BYTES = 1 << 20
"""The longest piece in which Gloo reduces."""
HEADER_BYTES = 14 + 20 + 20 + 12
"""Ethernet, IPv4, TCP and its time stamps, of each packet."""
MTU_BYTES = 1500
MOST_KNOWN = 1024
"""Counts that are kept: a run repeats the same few calls."""


class Volume:
    """What rank `rank` of a group sends; `hosts` are the identities of all its ranks' hosts, in rank order.

    `tables` gives the table by which an operation is made, from its name, payload and root; None where the backend has
    its own way. `own` says which calls the backend makes by an algorithm of its own rather than by Gloo's; None: all.
    """

    def __init__(
        self,
        backend: str,
        rank: int,
        hosts: Sequence[str],
        *,
        tables: Tables | None = None,
        own: OwnAlgorithm | None = None,
    ) -> None:
        self.backend, self.rank, self.hosts, self._tables = backend, rank, tuple(hosts), tables
        self._own = own
        self._division = division_of(hosts)
        self._known: dict[tuple[str, int, int, bool], tuple[CollectiveTable | None, Sent]] = {}

    def left_to_gloo(self, operation: str, tensors: Sequence[Any], reduce_op: Any, *, lists: bool) -> bool:
        """Whether the backend leaves this call to Gloo; `reduce_op` is None where nothing is reduced."""
        return self._own is not None and (lists or not self._own(operation, tensors, reduce_op))

    def __call__(
        self, operation: str, payload: int, *, peer: int = 0, parts: Sequence[int] = (), as_gloo: bool = False
    ) -> Sent:
        """`peer` is the root, or the receiver; `parts` are the shares of ranks in an uneven all-to-all.

        `as_gloo`: the backend has left this call to Gloo; it is counted neither on two levels nor by a table.
        """
        if parts:
            return self._count(operation, payload, peer, parts, None, as_gloo)
        key = (operation, payload, peer, as_gloo)
        table = self._tables(operation, payload, peer) if self._tables and not as_gloo else None
        known = self._known.get(key)
        if known is None or known[0] is not table:  # links have changed, and the table with them
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = table, self._count(operation, payload, peer, parts, table, as_gloo)
        return known[1]

    def _count(
        self,
        operation: str,
        payload: int,
        peer: int,
        parts: Sequence[int],
        table: CollectiveTable | None,
        as_gloo: bool,
    ) -> Sent:
        flat = self.backend if self.backend != "hierarchical" else "gloo"
        if flat != self.backend and operation not in _LEFT_TO_GLOO and not as_gloo:
            return _on_two_levels(operation, payload, self.rank, peer, self._division)
        if parts and sum(parts):
            traffic = {to: payload * part // sum(parts) for to, part in enumerate(parts) if to != self.rank}
        elif table is not None:
            whole = payload * len(self.hosts) if operation == "all_gather" else payload
            traffic = table_traffic(table, whole, rank=self.rank)
        else:
            traffic = traffic_of(operation, payload, rank=self.rank, size=len(self.hosts), backend=flat, peer=peer)
        here = self.hosts[self.rank]
        inside = sum(sent for to, sent in traffic.items() if self.hosts[to] == here)
        return Sent(inside, sum(traffic.values()) - inside)


def bytes_sent(operation: str, payload: int, *, size: int, backend: str) -> int:
    """Bytes sent by one of `size` ranks, averaged over the ranks where the operation is rooted (broadcast, gather)."""
    if size == 1:
        return 0
    if operation == "send":
        return payload
    ranks = range(size) if operation in _ROOTED else range(1)
    sent = [sum(traffic_of(operation, payload, rank=rank, size=size, backend=backend).values()) for rank in ranks]
    return sum(sent) // len(sent)


def traffic_of(operation: str, payload: int, *, rank: int, size: int, backend: str, peer: int = 0) -> Traffic:
    """What `rank` sends to each other rank; `peer` is the root, or the receiver of a message."""
    if size == 1 or operation in ("recv", "barrier"):
        return {}
    others = [other for other in range(size) if other != rank]
    match operation:
        case "send":
            return {peer: payload}
        case "gather":
            return {peer: payload} if rank != peer else {}
        case "scatter":
            return dict.fromkeys(others, payload // size) if rank == peer else {}
        case "all_to_all":
            return _spread(payload * len(others) // size, others)
        case "broadcast" if backend == "gloo":
            return dict.fromkeys(_children(rank, size, peer), payload)
        case "broadcast":
            return dict.fromkeys(others, payload) if rank == peer else {}
        case "reduce":
            return _reduce(payload, rank, size, peer, backend=backend)
    if backend == "shm":
        times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": size}[operation]
        return _spread(times * payload * len(others) // size, others)
    return _ring(operation, payload, rank, size, backend)


def table_traffic(table: CollectiveTable, size_bytes: int, *, rank: int) -> Traffic:
    """Of a table of `shoal.collectives` on a vector of `size_bytes`, or of what one rank holds for an all-to-all."""
    cells: dict[int, int] = {}
    for step in table.rows[rank]:
        for send in step.sends:
            cells[send.to] = cells.get(send.to, 0) + len(send.cells)
    return {to: count * size_bytes // table.chunks for to, count in cells.items()}


def wire_bytes(payload: int, *, packet_bytes: int = MTU_BYTES) -> float:
    """With the headers of TCP/IP over Ethernet, where packets hold `packet_bytes` behind the Ethernet header.

        wire = payload (1 + 66 / (MTU - 52)),    MTU 1500: 1448 bytes in 1514, 4.6 % more

    Interface counters of virtual links see long packets before they are cut to the MTU, and count their headers once.
    """
    return payload * (1 + HEADER_BYTES / (packet_bytes - (HEADER_BYTES - 14)))


_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_LEFT_TO_GLOO = ("all_to_all", "gather", "scatter")


def _ring(operation: str, payload: int, rank: int, size: int, backend: str) -> Traffic:
    before, after, others = (rank - 1) % size, (rank + 1) % size, size - 1
    if operation == "all_gather":
        return {after: others * payload}
    if operation == "all_reduce" or backend == "gloo":
        return {before: 2 * payload * others // size}
    return {before: payload * others // size}


def _spread(whole: int, over: Sequence[int]) -> Traffic:
    """Equal parts, the rest to the last."""
    part = whole // len(over)
    return {**dict.fromkeys(over, part), over[-1]: whole - part * (len(over) - 1)}


def _children(rank: int, size: int, root: int) -> list[int]:
    """In a binomial tree, numbered from the root: v sends to v + 2^k for every 2^k above v."""
    place, step, found = (rank - root) % size, 1, []
    while step < size:
        if place < step and place + step < size:
            found.append((place + step + root) % size)
        step *= 2
    return found


def _reduce(payload: int, rank: int, size: int, root: int, *, backend: str) -> Traffic:
    if backend not in ("gloo", "shm"):
        return {root: payload} if rank != root else {}
    if backend == "gloo":
        sent = {(rank - 1) % size: payload - round(2 * min(payload / (2 * size), SEGMENT_BYTES))}
    else:
        sent = dict.fromkeys((other for other in range(size) if other != rank), payload // size)
    if rank != root:
        sent[root] = sent.get(root, 0) + payload // size
    return sent


def _on_two_levels(operation: str, payload: int, rank: int, peer: int, division: Division) -> Sent:
    """`shoal.comm.hierarchical`: inside, what its `two_levels` calls through shared memory, one after the other;
    between, leaders straight to each other."""
    host, place = division.places[rank]
    if operation in ("recv", "barrier"):
        return Sent()
    if operation == "send":
        near = division.places[peer][0] == host
        return Sent(inside_bytes=payload) if near else Sent(between_bytes=payload)
    mates, hosts, ranks = len(division.hosts[host]), len(division.hosts), division.size
    leads = place == 0
    root_host, root_place = division.places[peer] if operation in ("broadcast", "reduce") else (0, 0)
    handed_on = leads and host == root_host and root_place != 0
    calls = {
        "all_reduce": [("reduce", payload, 0), ("broadcast", payload, 0)],
        "reduce_scatter": [("reduce", payload, 0), ("scatter", payload * mates // ranks, 0)],
        "all_gather": [("gather", payload, 0), ("broadcast", ranks * payload, 0)],
        "broadcast": [("broadcast", payload, root_place if host == root_host else 0)],
        "reduce": [("reduce", payload, 0), *([("send", payload, root_place)] if handed_on else [])],
    }[operation]
    inside = sum(
        sum(traffic_of(name, part, rank=place, size=mates, backend="shm", peer=to).values()) for name, part, to in calls
    )
    between = {
        "all_reduce": 2 * payload * (hosts - 1) // hosts,
        "reduce_scatter": payload * (ranks - mates) // ranks,
        "all_gather": (hosts - 1) * mates * payload,
        "broadcast": payload * len(_children(host, hosts, root_host)),
        "reduce": payload if host != root_host else 0,
    }[operation]
    return Sent(inside, between if leads else 0)
