"""Modules in which values skip stages: those of their inputs, of the first block, and of an encoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LONGEST = 61, 16, 64


class Block(nn.Module):
    """Attention to `memory`, or to itself, and a feed-forward layer; dropout as a function and as a module."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.drop, self.chance = nn.Linear(WIDTH, WIDTH), nn.Dropout(drop), drop

    def forward(self, x: Tensor, places: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        own = self.norm(x) if places is None else self.norm(x) + places
        k, v = self.kv(own if memory is None else memory).chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(self.q(own), k, v, is_causal=memory is None)
        return x + self.drop(self.out(F.dropout(mixed, self.chance, self.training)))


class Relayed(nn.Module):
    """A decoder that `torch.fx` cannot trace: it looks at the length of its input."""

    def __init__(self, drop: float = 0.1, blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block(drop) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > LONGEST:
            raise ValueError(f"cannot take {tokens.shape[1]} tokens")
        return self.embed(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = self.one(block, x)
        return self.head(self.norm(x))

    def one(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Places(Relayed):
    """Sinusoids of the positions go to every block, by name, before the activations; and dropout between blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] / 10 ** torch.linspace(0, 3, WIDTH)
        for block in self.blocks:
            x = F.dropout(block(x=x, places=angles.sin().to(x.dtype)), 0.1, self.training)
        return self.head(self.norm(x))


class TiedEnds(Relayed):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class LearnedPlaces(Relayed):
    """A parameter of the first stage goes to every block: it cannot be cut behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LONGEST, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x, places = self.embedded(tokens), self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, places)
        return self.head(self.norm(x))


class FirstResidual(Relayed):
    """What the embedding gives is added before the head: only in front of the first block is there one value."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


class EncoderDecoder(Relayed):
    """Half of the blocks encode; what they give goes to all of the others."""

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.embedded(tokens)
        for block in self.blocks[:2]:
            memory = block(memory)
        x = memory
        for block in self.blocks[2:]:
            x = block(x, memory=memory)
        return self.head(self.norm(x))


class TrainingOnly(FirstResidual):
    """The residual of the first stage is there in training alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) if self.training else Relayed.forward(self, tokens)


class Told(Block):
    """A block that leaves its input where the others find it, or finds there what the first has left."""

    def __init__(self, shared: dict[str, Tensor], *, first: bool) -> None:
        super().__init__(0.0)
        self.shared, self.first = shared, first

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        if self.first:
            self.shared["first"] = x
        return super().forward(x) + 0.1 * self.shared["first"]


class SharedState(Relayed):
    """A value skips stages by a dictionary, which a stage on another rank does not see."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.shared: dict[str, Tensor] = {}
        self.blocks = nn.ModuleList(Told(self.shared, first=i == 0) for i in range(4))


KINDS: dict[str, type[Relayed]] = {
    kind.__name__: kind
    for kind in (Relayed, Places, TiedEnds, LearnedPlaces, FirstResidual, EncoderDecoder, TrainingOnly, SharedState)
}


def build(name: str) -> nn.Module:
    """One of them, drawn from a seed."""
    torch.manual_seed(5)
    return KINDS[name]()
