"""Bytes that one rank puts on the wire in a collective: closed forms.

`payload` is the size of the tensor a rank contributes (all-reduce, broadcast, reduce, all-gather's input,
reduce-scatter's and all-to-all's whole input). The forms are those of the algorithms that the backends run: ring for
all-reduce and all-gather, pairwise exchange for all-to-all. Gloo's reduce-scatter is an all-reduce and a slice, also
where it stands behind shared memory ("shm"). Through memory nothing is sent: there, an all-reduce counts what a rank
moves to and from others, which is as much as in the ring.
"""

from __future__ import annotations


def bytes_sent(operation: str, payload: int, *, size: int, backend: str) -> int:
    """Bytes sent by one of `size` ranks, averaged over the ranks where the operation is rooted (broadcast, gather)."""
    if size == 1:
        return 0
    others = size - 1
    if operation == "all_reduce" or (operation == "reduce_scatter" and backend in ("gloo", "shm")):
        return 2 * payload * others // size
    if operation in ("reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"):
        return payload * others // size
    if operation == "all_gather":
        return payload * others
    return payload if operation == "send" else 0
