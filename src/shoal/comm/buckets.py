"""Buckets: which gradients travel together. Pure.

Gradients become ready roughly in the reverse order in which the parameters were registered. So buckets are cut from
the reversed list; the first is small, so that the wire is busy early (Li et al., PyTorch Distributed, VLDB 2020,
section 3.2.3).
The cut depends on names, sizes and the two limits alone: every rank and every resumed run gets the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A gradient: its index in the parameter list, its length, and what it can share a buffer with (dtype, device)."""

    index: int
    numel: int
    bytes: int
    kind: Hashable


def cut(members: Sequence[Member], *, first_bytes: int, bytes_limit: int) -> list[list[Member]]:
    """The buckets, in the order in which they are sent. A gradient larger than the limit has a bucket of its own."""
    buckets: list[list[Member]] = []
    open_buckets: dict[Hashable, list[Member]] = {}
    for member in reversed(members):
        bucket = open_buckets.get(member.kind)
        limit = first_bytes if bucket is not None and bucket is buckets[0] else bytes_limit
        if bucket is None or sum(m.bytes for m in bucket) + member.bytes > limit:
            bucket = open_buckets[member.kind] = []
            buckets.append(bucket)
        bucket.append(member)
    return buckets
