"""Causal self-attention in which groups of query heads share a key and value head (arXiv:2305.13245)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.rotary import rotated


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(head_size)) v, where each token sees those before it, itself, and its own document only.

    A module without parameters, so that a rank that holds a part of every sequence can put another in its place.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """`query` `[batch, heads, seq, head_size]`, `key` and `value` with `kv_heads`, a divisor; as `query`."""
        grouped = query.shape[1] != key.shape[1]
        if documents is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        same = documents[:, None, :, None] == documents[:, None, None, :]
        before = torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=same & before, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    The four projections stay separate layers so that each has one role. How many heads there are is read off their
    outputs: a rank that holds a part of the heads runs the same code. So does one on a grid, whose projections take a
    part of the tokens and give all of them: no length is read off the input either (`takes_blocks`).
    """

    takes_blocks = True

    def __init__(self, width: int, *, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query = nn.Linear(width, heads * self.head_size, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(heads * self.head_size, width, bias=False)
        self.core: nn.Module = CausalAttention()

    def forward(self, x: Tensor, factors: Tensor, documents: Tensor | None = None) -> Tensor:
        """`x` `[batch, seq, width]`; `factors` are the positions' `rotations`, `documents` `[batch, seq]` integers."""
        query = rotated(self._heads(self.query(x)), factors).transpose(1, 2)
        key = rotated(self._heads(self.key(x)), factors).transpose(1, 2)
        value = self._heads(self.value(x)).transpose(1, 2)
        return self.output(self.core(query, key, value, documents).transpose(1, 2).flatten(2))

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, self.head_size))
