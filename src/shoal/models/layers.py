"""The layers between attentions: gated with SiLU (SwiGLU, Shazeer, arXiv:2002.05202) or plain with GELU.

Rotary positions (Su et al., arXiv:2104.09864): neighbouring features turn by an angle that grows with the position.

    (x_2i, x_2i+1)  as a complex number, times  exp(1j * position * base^(-2i / head_size))

A query and a key that are turned so have a product that depends on their distance alone. The complex form takes one
pass over memory where the form with halves takes six: 0.5 ms instead of 2.0 ms, forward and backward, for 0.5 million
float32 numbers on one core.

Causal self-attention in which groups of query heads share a key and value head (arXiv:2305.13245).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), over the last dimension of `[..., width]`."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden_width, bias=False)
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    """down(gelu(up(x))), over the last dimension of `[..., width]`."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def rotations(positions: Tensor, *, head_size: int, base: float) -> Tensor:
    """The factor of each pair of features at each position, complex64 `[*positions.shape, 1, head_size / 2]`.

    Angles are float32, whatever the model's type. The dimension of 1 broadcasts over heads.
    """
    pairs = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device)
    angles = positions.to(torch.float32)[..., None, None] * base ** (-pairs / head_size)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, factors: Tensor) -> Tensor:
    """`x` `[batch, seq, heads, head_size]` with each pair of features turned; computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)


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

    `core` computes it from queries, keys and values; default: causal, over all tokens.

    The four projections stay separate layers so that each has one role. How many heads there are is read off their
    outputs: a rank that holds a part of the heads runs the same code. So does one on a grid, whose projections take a
    part of the tokens and give all of them: no length is read off the input either (`takes_blocks`).
    """

    takes_blocks = True

    def __init__(self, width: int, *, heads: int, kv_heads: int, core: CausalAttention | None = None) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query = nn.Linear(width, heads * self.head_size, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(heads * self.head_size, width, bias=False)
        self.core: nn.Module = core or CausalAttention()

    def forward(self, x: Tensor, factors: Tensor, documents: Tensor | None = None) -> Tensor:
        """`x` `[batch, seq, width]`; `factors` are the positions' `rotations`, `documents` `[batch, seq]` integers."""
        query = rotated(self._heads(self.query(x)), factors).transpose(1, 2)
        key = rotated(self._heads(self.key(x)), factors).transpose(1, 2)
        value = self._heads(self.value(x)).transpose(1, 2)
        return self.output(self.core(query, key, value, documents).transpose(1, 2).flatten(2))

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, self.head_size))
