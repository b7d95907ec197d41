"""What goes between hosts: closed forms, of `Hierarchical` and of what it stands instead of.

Of n ranks on m hosts, payload S bytes on each rank (all-gather: its input; the others: the whole vector). In all, over
all hosts, headers not counted; the ring is Gloo's, its neighbours numbered host by host:

    operation         two levels          ring over all ranks      so
    all_reduce        2 (m-1) S           2 m (n-1)/n S            two levels: n (m-1) / m (n-1) of the ring
    reduce_scatter    (m-1) S             2 m (n-1)/n S (*)        two levels
    all_gather        (m-1) n S           m (n-1) S                two levels
    broadcast         (m-1) S             (m-1) S to (n-1) S       two levels
    reduce            (m-1) S             about m (n-1)/n S        two levels
    barrier           nothing to count                             two levels: m ranks meet, not n
    gather, scatter   (n-g) S, g ranks beside the root             the same bytes; left to Gloo
    all_to_all        blocks of two hosts are all different        the same bytes; left to Gloo
    send, recv        S, or nothing inside a host                  shared memory inside a host, else Gloo

(*) Gloo's reduce-scatter is an all-reduce and a slice. Where all neighbours in the ring are on different hosts, m
becomes n. A leader's share of an all-reduce is 2 (m-1)/m S sent: the least that any algorithm needs of a host
(Patarasuk and Yuan, JPDC 69(2), 2009, theorem 1, with hosts for ranks).
"""

from __future__ import annotations

TWO_LEVELS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
"""The collectives that pay for two levels."""


def between_hosts(operation: str, payload: int, *, ranks: int, hosts: int) -> int:
    """Bytes that `operation`, one of `TWO_LEVELS`, sends between hosts, over all of them."""
    factor = {"all_reduce": 2, "all_gather": ranks, "barrier": 0}.get(operation, 1)
    return factor * (hosts - 1) * payload


def ring_between_hosts(operation: str, payload: int, *, ranks: int, hosts: int) -> float:
    """The same of Gloo's rings over all ranks, numbered host by host."""
    if operation == "all_gather":
        return hosts * (ranks - 1) * payload
    steps = {"all_reduce": 2, "reduce_scatter": 2, "reduce": 1}[operation]
    return steps * hosts * (ranks - 1) / ranks * payload
