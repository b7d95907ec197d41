"""Models that a user might bring, and how the tests of this room make them ready to be traced."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.tensor.vocabulary import VocabularySplit
from shoal.planner.trace.operator import TracedGroup
from shoal.planner.trace.subject import Step, Subject
from tests.verification.user_models import Biased

WIDTH, LENGTH, CLASSES = 32, 16, 10


class Residual(nn.Module):
    """A block with attention and biases that is none of this project's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mixed(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.back(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.other_norm(x))))


class Blocks(nn.Module):
    """Vectors `[samples, length, width]` through residual blocks to classes."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Looking(nn.Module):
    """Chooses its path by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() > 0 else self.layer(-x)


class FailsInParts(Biased):
    """Needs its first layer whole."""

    def __init__(self) -> None:
        super().__init__(61, 16, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        if len(self.feed_forward[0].weight) < 24:  # pyright: ignore[reportArgumentType]
            raise ValueError("the first layer is not whole")
        return super().forward(tokens)


def vectors(samples: int) -> Tensor:
    """Inputs of these models."""
    return torch.randn(samples, LENGTH, WIDTH)


def subject(
    build: Callable[[], nn.Module],
    inputs: Callable[[int], Tensor] = vectors,
    loss: Callable[[Tensor], Tensor] = lambda outputs: outputs.square().sum(),
) -> Subject:
    """The model of `build`, with a loss of its outputs on `inputs(samples)`."""

    def steps(
        model: nn.Module, samples: int, *, vocabulary: VocabularySplit | None, group: TracedGroup, loss_chunks: int = 1
    ) -> Step:
        assert loss_chunks == 1, "none of these models ends in logits of tokens"
        x = inputs(samples)
        return Step(lambda: loss(model(x)), (x,))

    return Subject.built(build, steps, dtype=torch.float32)


class Normed(nn.Module):
    """Images `[samples, 1, 8, 8]` through a batch norm, with blocks, to classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
