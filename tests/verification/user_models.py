"""A model that a user might bring: layers with biases, and the roles that tensor parallelism needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.models.roles import Role


class Biased(nn.Module):
    """Embedding, one feed-forward with biases on a residual stream, head."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.feed_forward(self.norm(x)))

    def parameter_roles(self) -> dict[str, Role]:
        return {
            "embedding.*": Role("embedding", None, decay=True),
            "norm.*": Role("norm", None, decay=False),
            "feed_forward.0.*": Role("column", None, decay=True),
            "feed_forward.2.weight": Role("row", None, decay=True),
            "feed_forward.2.bias": Role("bias", None, decay=False),
            "head.*": Role("head", None, decay=True),
        }


def biased(vocabulary: int = 61, width: int = 16, hidden: int = 24) -> nn.Module:
    torch.manual_seed(3)
    return Biased(vocabulary, width, hidden)


class Strided(nn.Module):
    """A weight that lies transposed in memory, and blocks that are no modules to be called."""

    def __init__(self, *, direct: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.turned = nn.Parameter(torch.randn(16, 16).t())
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 16)]) for _ in range(2))
        self.flat = nn.ModuleList([nn.Linear(16, 16, bias=False)])
        self.head = nn.Linear(16, 61)
        self.direct = direct

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) @ self.turned
        for first, second in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + second(torch.relu(first(x)))
        last = self.flat[0]
        return self.head(x + (nn.functional.linear(x, last.weight) if self.direct else last(x)))  # type: ignore[arg-type]


def strided(direct: bool = False) -> nn.Module:
    torch.manual_seed(5)
    return Strided(direct=direct)


class Ragged:
    """Token samples of three lengths, in no order."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = 4 * (2 + (index * 7) % 3)
        tokens = torch.randint(0, 61, (length + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


def ragged() -> Ragged:
    return Ragged()
