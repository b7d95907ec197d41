"""Attention by exchanging heads for sequence (DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509).

    [batch, heads, seq / size, head_size]  --all-to-all-->  [batch, heads / size, seq, head_size]

In between each rank has whole sequences of some heads, and attention is the ordinary one. Key and value heads that are
too few for the ranks are sent to each rank that needs them; the gradients of the copies add up.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective
from shoal.errors import LayoutError
from shoal.models.attention_config import SparseAttentionConfig
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import WholeSequences
from shoal.parallel.context.core import SEQUENCE, ContextCore, by_rank, gathered, in_sequence
from shoal.topology.refusal import nearest_divisors


class UlyssesAttention(ContextCore):
    """`ContextCore` by two all-to-alls. `mask`: which tokens a token sees; None: all before it."""

    def __init__(self, group: Collective, mask: SparseAttentionConfig | None = None) -> None:
        super().__init__(group)
        self._whole = CausalAttention().forward if mask is None else WholeSequences(mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        size, heads, kv_heads = self.group.size, query.shape[1], key.shape[1]
        check_heads(heads, size)
        copies = kv_copies(kv_heads, size)
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        parts = torch.cat([x.unflatten(1, (size, -1)) for x in (query, key, value)], dim=2).movedim(1, 0)
        whole = in_sequence(_Exchange.apply(parts, self.group), dim=SEQUENCE)
        own = (heads // size, kv_heads * copies // size, kv_heads * copies // size)
        all_documents = None if documents is None else in_sequence(gathered(self.group, documents), dim=-1)
        query, key, value = whole.split(own, dim=1)
        out = self._whole(query, key, value, all_documents)
        return _Exchange.apply(by_rank(out, size=size, dim=SEQUENCE), self.group).movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Part i of `[size, ...]` goes to rank i, part j comes from rank j; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return _exchanged(group, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(ctx.group, grads[0]), None


def _exchanged(group: Collective, parts: Tensor) -> Tensor:
    parts = parts.contiguous()
    output = torch.empty_like(parts)
    group.all_to_all(output, parts).wait()
    return output


def kv_copies(kv_heads: int, size: int) -> int:
    """How often each key and value head is sent, so that every rank has those of its query heads."""
    return size // math.gcd(kv_heads, size)


def check_heads(heads: int, size: int) -> None:
    """Raises `LayoutError` unless `size` ranks can each take as many of the query heads, those of a tensor rank."""
    if heads % size:
        fitting = " or ".join(f"context={n}" for n in nearest_divisors(heads, size))
        raise LayoutError(
            f"context={size} with kind 'ulysses' does not divide the {heads} query heads of a rank, which it exchanges "
            f"for parts of the sequence; nearest: {fitting}, or another kind"
        )
