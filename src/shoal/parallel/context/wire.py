"""Bytes that a context rank sends for one attention, forward and backward: closed forms beside the wire's own count.

With K the bytes of a rank's keys, and C ranks:

    ring        2 K (C - 1) forward; the same again and the gradients, 2 K' (C - 1), backward
    allgather   2 K (C - 1) forward; the same again and a reduce-scatter of 2 K' C backward
    ulysses     (C - 1) / C of query, keys, values and result, each way; keys and values in `kv_copies`

K' is K in float32 at least: terms of gradients are added up in a wide type.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.volume import bytes_sent
from shoal.parallel.context.put import ContextKind
from shoal.parallel.context.ulysses import kv_copies

WIDE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """One attention of a rank: `tokens` are the rank's own, over all its samples."""

    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    element_bytes: int


def attention_bytes_sent(kind: ContextKind, sizes: AttentionSizes, *, size: int, backend: str) -> int:
    """Bytes sent by one of `size` ranks for one forward and backward; documents not counted."""
    numel = sizes.tokens * sizes.kv_heads * sizes.head_size
    block, wide_block = 2 * numel * sizes.element_bytes, 2 * numel * max(WIDE_BYTES, sizes.element_bytes)
    if kind == "ulysses":
        heads = 2 * sizes.heads + 2 * sizes.kv_heads * kv_copies(sizes.kv_heads, size)
        each_way = sizes.tokens * heads * sizes.head_size * sizes.element_bytes
        return 2 * bytes_sent("all_to_all", each_way, size=size, backend=backend)
    if kind == "ring":
        return (2 * block + wide_block) * (size - 1)
    gradients = bytes_sent("reduce_scatter", wide_block * size, size=size, backend=backend)
    return 2 * bytes_sent("all_gather", block, size=size, backend=backend) + gradients
