"""A text encoder with padded masks, as BERT classifies (arXiv:1810.04805): which of two words is more frequent?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.models.attention import Block

PADDING, LENGTH, WORDS = 0, 24, 20


class Encoder(nn.Module):
    """Tokens `[batch, seq]`, 0 where there is none, to logits `[batch, 2]` from the mean over the real tokens."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != PADDING
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, real[:, None, None])
        kept = real[..., None].to(x.dtype)
        return self.head((self.norm(x) * kept).sum(1) / kept.sum(1))


class Sentences:
    """Random words, of which 1 and 2 are counted; the label says whether 2 is more frequent, and they never tie."""

    def __init__(self, samples: int, first: int) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))
        words = torch.randint(1, 6, (length,), generator=generator)
        ones, twos = int((words == 1).sum()), int((words == 2).sum())
        if ones == twos:
            words[0] = 2 if words[0] != 2 else 1
            ones, twos = int((words == 1).sum()), int((words == 2).sum())
        tokens = torch.full((LENGTH,), PADDING)
        tokens[:length] = words
        return tokens, int(twos > ones)


def build(width: int = 48, depth: int = 2, heads: int = 4) -> Encoder:
    """The module of the run file."""
    return Encoder(width, depth, heads)


def sentences() -> tuple[Sentences, Sentences]:
    """Training and held-out sentences."""
    return Sentences(20_000, 0), Sentences(1_000, 10**6)
