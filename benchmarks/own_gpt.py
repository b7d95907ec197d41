"""A GPT as users bring one: a module that knows nothing of Shoal, for `shoal bench step --model`.

    shoal bench step --model benchmarks.own_gpt:build --tokens 256,2048

Pre-norm blocks of causal attention and a GELU feed-forward over learned positions, as GPT-2 has them (Radford et al.,
2019), at five million parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SEQUENCE, WIDTH, HEADS, LAYERS = 256, 128, 256, 8, 6


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, dim] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then a feed-forward, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.forward_norm(x))


class OwnGPT(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocabulary]."""

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        sequence: int = SEQUENCE,
        width: int = WIDTH,
        heads: int = HEADS,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


def build(**sizes: int) -> OwnGPT:
    """The module, its parameters drawn from PyTorch's generator. `sizes`: those of `OwnGPT`."""
    return OwnGPT(**sizes)
