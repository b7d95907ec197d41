"""A pre-norm transformer block, shared by the recipes that need one (arXiv:1706.03762, arXiv:2002.04745)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention `[batch, seq, width]`; `mask` `[batch, 1, 1, seq]` is true where a key may be seen."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).view(b, t, self.heads, self.head_width).transpose(1, 2) for layer in layers)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    """Attention and feed-forward, each behind its norm, around the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.down(F.gelu(self.up(self.norm(x))))
