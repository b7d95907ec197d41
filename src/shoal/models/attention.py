"""Causal self-attention in which groups of query heads share a key and value head (arXiv:2305.13245)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.rotary import rotated


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    The four projections stay separate layers so that each has one role. How many heads there are is read off their
    outputs: a rank that holds a part of the heads runs the same code.
    """

    def __init__(self, width: int, *, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query = nn.Linear(width, heads * self.head_size, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(heads * self.head_size, width, bias=False)

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        """`x` `[batch, seq, width]`, each token sees those before it; `factors` are the positions' `rotations`."""
        query = rotated(self._heads(self.query(x)), factors).transpose(1, 2)
        key = rotated(self._heads(self.key(x)), factors).transpose(1, 2)
        value = self._heads(self.value(x)).transpose(1, 2)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, self.head_size))
