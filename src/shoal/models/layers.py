"""Layers of the built-in models: feed-forwards, rotary positions, causal attention, dropout by sample."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.maths.counter import bits, indices, key_of

# The layers between attentions: gated with SiLU (SwiGLU, Shazeer, arXiv:2002.05202) or plain with GELU.


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


# Rotary positions (Su et al., arXiv:2104.09864): neighbouring features turn by an angle that grows with the position.
#
#     (x_2i, x_2i+1)  as a complex number, times  exp(1j * position * base^(-2i / head_size))
#
# A query and a key that are turned so have a product that depends on their distance alone. The complex form takes one
# pass over memory where the form with halves takes six: 0.5 ms instead of 2.0 ms, forward and backward, for 0.5 million
# float32 numbers on one core. A compiler fuses the six, and none of complex numbers: it gets the halves.


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
    pairs = wide.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), torch.view_as_real(factors).unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * factors)
    return turned.flatten(-2).to(x.dtype)


# Causal self-attention in which groups of query heads share a key and value head (arXiv:2305.13245).


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

    def __init__(
        self, width: int, *, heads: int, kv_heads: int, head_size: int, core: CausalAttention | None = None
    ) -> None:
        super().__init__()
        self.head_size = head_size
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


# Dropout whose masks belong to samples, not to batches.
#
# The mask of an element is a pure function of (the sample's key, the layer's name, the element's index in the sample):
#
#     keep  <=>  bits(bits(sample key, layer), index) >= p 2^64
#
# So it is the same however a batch is split over ranks and microbatches, whatever the order, and again when a layer is
# recomputed in the backward pass. `torch.nn.functional.dropout` can promise none of these.


class KeyedDropout(nn.Module):
    """Zeroes a share `p` of the features in training and scales the others by 1 / (1 - p); the identity otherwise.

    `name` tells the layers of a model apart: two layers of one name drop the same elements.
    """

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout p = {p}; a share of features is from 0 up to but not 1: choose one, such as 0.1")
        self.p = p
        self.name = name
        self.key = key_of(0, "dropout", name)
        self.threshold = math.floor(p * 2**64) - 2**63  # of bits read as signed integers
        self.sample_keys: Tensor | None = None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Drops from `x` `[batch, ...]`.

        `positions` `[batch, n]` (int64) are the places in their samples of `x`'s slices along dimension 1, for a rank
        that holds a part of each sample; default 0, 1, 2, ...
        Raises `RuntimeError` in training without keys, or with as many keys as `x` has not samples.
        """
        if self.p == 0 or not self.training:
            return x
        mask = bits(self._layer_keys(x), _elements(x, positions)) >= self.threshold
        return x * (mask.to(x.dtype) / (1 - self.p))

    def _layer_keys(self, x: Tensor) -> Tensor:
        """This layer's key for each sample, `[batch, 1, ...]` to broadcast against `x`."""
        keys = self.sample_keys
        if keys is None or keys.shape != x.shape[:1]:
            found = "no sample keys" if keys is None else f"sample keys of shape {list(keys.shape)}"
            raise RuntimeError(
                f"dropout '{self.name}' found {found} for a batch of {x.shape[0]} samples; in training every sample "
                f"has a key: call set_sample_keys(model.modules(), keys) before each forward"
            )
        return bits(keys, torch.full_like(keys, self.key)).view(-1, *[1] * (x.ndim - 1))

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"


def set_sample_keys(modules: Iterable[nn.Module], keys: Tensor | None) -> None:
    """Gives each `KeyedDropout` of `modules` the keys, int64 `[batch]`, of the samples that come next; None takes them.

    A recomputation uses them too: set them again before it if another batch went through the model in between.
    """
    for module in modules:
        if isinstance(module, KeyedDropout):
            module.sample_keys = keys


def _elements(x: Tensor, positions: Tensor | None) -> Tensor:
    """The index within its sample of every element of `x`, `[1 or batch, ...]`."""
    if positions is None:
        return indices(x.shape[1:], [0] * (x.ndim - 1), x.shape[1:], device=x.device)[None]
    within = indices(x.shape[2:], [0] * (x.ndim - 2), x.shape[2:], device=x.device)
    return positions.view(*positions.shape, *[1] * (x.ndim - 2)) * math.prod(x.shape[2:]) + within
