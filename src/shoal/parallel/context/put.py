"""Makes a model's attention see the whole sequence where the rank holds a part of it.

Bytes that a context rank sends for one attention, forward and backward: closed forms beside the wire's own count.

With K the bytes of a rank's keys, and C ranks:

    ring        2 K (C - 1) forward; the same again and the gradients, 2 K' (C - 1), backward
    allgather   2 K (C - 1) forward; the same again and a reduce-scatter of 2 K' C backward
    ulysses     (C - 1) / C of query, keys, values and result, each way; keys and values in `kv_copies`

K' is K in float32 at least: terms of gradients are added up in a wide type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import nn

from shoal.comm.collective import Collective
from shoal.comm.volume import bytes_sent
from shoal.errors import UserCodeError
from shoal.models.layers import CausalAttention
from shoal.parallel.context.allgather import GatheredAttention
from shoal.parallel.context.ring import RingAttention
from shoal.parallel.context.shard import ContextCore
from shoal.parallel.context.ulysses import UlyssesAttention, kv_copies

ContextKind = Literal["ring", "ulysses", "allgather"]

KINDS: Mapping[ContextKind, type[ContextCore]] = MappingProxyType(
    {"ring": RingAttention, "ulysses": UlyssesAttention, "allgather": GatheredAttention}
)


def check_context(model: nn.Module, group: Collective) -> None:
    """Raises `UserCodeError` for a whole model without `CausalAttention`, where `group` has several ranks."""
    if group.size > 1 and not _cores(model):
        raise UserCodeError(
            f"{type(model).__name__} has no module of type shoal.models.layers.CausalAttention, and without one a "
            f"rank sees only its own part of a sequence: compute attention in such a module, or set layout.context=1"
        )


def put_context(model: nn.Module, group: Collective, kind: ContextKind) -> None:
    """Replaces every `CausalAttention` of `model` by the kind's, over the context ranks of `group`.

    From then on the model is called with this rank's slices of the sequence and with its `positions` (see `shard`).
    Call it before `recompute`. A group of one rank changes nothing, and neither does a stage without attention.
    Raises `UserCodeError` for a module that is recomputed already.
    """
    if group.size == 1:
        return
    for name, module in _cores(model).items():
        if "forward" in vars(module):
            raise UserCodeError(f"'{name}' already has a forward of its own: split the context before recompute")
        model.set_submodule(name, KINDS[kind](group))


def _cores(model: nn.Module) -> dict[str, CausalAttention]:
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if type(module) is CausalAttention}


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
