"""Buckets: which gradients travel together. Pure.

Gradients become ready roughly in the reverse order in which the parameters were registered. So buckets are cut from
the reversed list; the first of each kind is small, so that the wire is busy early (Li et al., PyTorch Distributed, VLDB
2020, section 3.2.3).
The members of a bucket depend on the parameters of its own kind and the two limits alone: ranks that share a kind (its
group among it) cut it alike, whatever else each of them holds, and so does every resumed run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A gradient: its index in the parameter list, its length, and what it can share a buffer with.

    `kind` is all that has to be equal in one bucket: dtype, device, the ranks over which it is summed.
    """

    index: int
    numel: int
    bytes: int
    kind: Hashable


def cut(members: Sequence[Member], *, first_bytes: int, bytes_limit: int) -> list[list[Member]]:
    """The buckets, in the order in which they are sent. A gradient larger than the limit has a bucket of its own.

    A bucket is sent after those whose last gradient is ready before its own: a kind with few gradients, spread over
    the whole model, holds up no other.
    """
    buckets: list[list[Member]] = []
    of_kind: dict[Hashable, list[list[Member]]] = {}
    for member in reversed(members):
        mine = of_kind.setdefault(member.kind, [])
        limit = first_bytes if len(mine) == 1 else bytes_limit
        if not mine or sum(m.bytes for m in mine[-1]) + member.bytes > limit:
            mine.append([])
            buckets.append(mine[-1])
        mine[-1].append(member)
    return sorted(buckets, key=lambda bucket: -bucket[-1].index)
