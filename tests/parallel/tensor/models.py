"""Models to split: a GPT, and what users write."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.models.layers import set_sample_keys
from shoal.models.roles import Role

VOCABULARY, SEQUENCE = 40, 8


def batch(*, seq: int = SEQUENCE) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY - 1, (3, seq + 1), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[0, 3:5] = -100
    return ids[:, :-1].contiguous(), targets


def keyed_gpt(*, scale: float = 5.0, **keys: Any) -> nn.Module:
    """A GPT in training, in float64: attention far from uniform, norms' weights not alike, samples with keys."""
    with torch.device("meta"):
        model = build(GPTConfig(**{"vocabulary": VOCABULARY, "layers": 2, "width": 32, "heads": 4, **keys}))
    initialise(model, seed=0, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            uneven = torch.linspace(0.5, 1.5, parameter.shape[-1], dtype=parameter.dtype)
            parameter.mul_(uneven if "norm" in name else scale)
    set_sample_keys(model.modules(), torch.arange(3) + 7)
    return model


class TwoPairs(nn.Module):
    """A user's module with biases, in which a residual sum, a norm and two pairs of layers stand in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.third, self.fourth = nn.Linear(6, 4), nn.Linear(4, 6, bias=False)
        self.chain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 4), nn.Linear(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.tanh(self.first(self.norm(x))))
        x = x + self.fourth(torch.tanh(self.third(x)) * 2)
        return x + self.chain(x)

    def parameter_roles(self) -> dict[str, Role]:
        columns, rows = ("first", "third", "chain.0", "chain.3"), ("second", "fourth", "chain.2", "chain.4")
        return {
            "norm.*": Role("norm", None, decay=False),
            **{f"{name}.*": Role("column", None, decay=True) for name in columns},
            **{f"{name}.weight": Role("row", None, decay=True) for name in rows},
            "*.bias": Role("bias", None, decay=False),
        }


class UserGPT(nn.Module):
    """A user's transformer: a layer whose norms, heads and feed-forward are children of one module; queries have a
    norm for each head; code that reads the length off its input; a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.layers = nn.ModuleList(UserLayer() for _ in range(2))
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer.attention(layer.norm(x))
            x = layer(x)
        return self.out(x)

    def parameter_roles(self) -> dict[str, Role]:
        kinds = {
            "tokens.*": "embedding",
            "out.*": "head",
            "*norm.*": "norm",
            "*.o.weight": "row",
            "*.down.weight": "row",
        }
        kinds |= {"*.o.bias": "bias", "*.down.bias": "bias", "*": "column"}
        return {pattern: Role(kind, None, decay=True) for pattern, kind in kinds.items()}


class UserLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = UserAttention()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)
        self.last = UserFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.relu(self.up(self.second_norm(x))))
        return x + self.last(x)


class UserFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class UserAttention(nn.Module):
    head_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)
        self.head_norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.head_norm(self.q(x).view(batch, length, -1, 4)).transpose(1, 2)
        kv = self.kv(x).view(batch, length, -1, 4).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


def seeded(kind: type[nn.Module]) -> nn.Module:
    """A user's module in float64, every number of it random."""
    torch.manual_seed(0)
    model = kind().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def two_pairs() -> nn.Module:
    return seeded(TwoPairs)


def user_gpt() -> nn.Module:
    return seeded(UserGPT)


class Declaring(nn.Module):
    """A module with the given children and roles, for what is refused."""

    def __init__(self, kinds: dict[str, str], **children: nn.Module) -> None:
        super().__init__()
        self.kinds = kinds
        for name, child in children.items():
            self.add_module(name, child)

    def parameter_roles(self) -> dict[str, Role]:
        kinds: Any = self.kinds
        return {pattern: Role(kind, None, decay=True) for pattern, kind in kinds.items()}
