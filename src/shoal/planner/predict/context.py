"""What splitting sequences over context ranks costs in a layer where nothing hides it: messages, passes over memory.

With b bytes of this rank's queries, k bytes of its keys and values together, c ranks (`parallel.context`):

    ring       c - 1 shifts of k forward, 2 (c - 1) backward; every block's result is merged into the sum: passes over
               8 b a block forward, 3 b + 6 k backward
    ulysses    all-to-alls of b + k and of b, forward and backward; each is packed and unpacked: passes over 4 (2 b + k)
    allgather  a gather of c k forward, one more and a scattered sum of it backward
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.cost.wire import Links

ContextKind = Literal["ring", "ulysses", "allgather"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Seconds of one layer."""

    forward_s: float
    backward_s: float


def exchange(kind: ContextKind, group: Links, *, query_bytes: float, key_bytes: float, copy_bytes_s: float) -> Exchange:
    """`key_bytes` are keys and values of one rank together."""
    if group.ranks == 1:
        return Exchange(forward_s=0.0, backward_s=0.0)
    return {"ring": _ring, "ulysses": _ulysses, "allgather": _allgather}[kind](
        group, query_bytes, key_bytes, copy_bytes_s
    )


def _ring(group: Links, query_bytes: float, key_bytes: float, copy_bytes_s: float) -> Exchange:
    hops, shift_s = group.ranks - 1, group.send(key_bytes)
    merged = (2 * key_bytes + group.ranks * 8 * query_bytes) / copy_bytes_s
    added = (2 * key_bytes + group.ranks * (3 * query_bytes + 6 * key_bytes)) / copy_bytes_s
    return Exchange(forward_s=hops * shift_s + merged, backward_s=2 * hops * shift_s + added)


def _ulysses(group: Links, query_bytes: float, key_bytes: float, copy_bytes_s: float) -> Exchange:
    wires = group.all_to_all(query_bytes + key_bytes) + group.all_to_all(query_bytes)
    one = wires + 4 * (2 * query_bytes + key_bytes) / copy_bytes_s
    return Exchange(forward_s=one, backward_s=one)


def _allgather(group: Links, query_bytes: float, key_bytes: float, copy_bytes_s: float) -> Exchange:
    gather_s = group.all_gather(group.ranks * key_bytes)
    return Exchange(forward_s=gather_s, backward_s=2 * gather_s)
