"""Modules as they are found in other people's code: nested, stateful, with dropout and caches, declaring nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.models.roles import Part, Role, run_chain

VOCABULARY, WIDTH = 61, 16


class Block(nn.Module):
    """Pre-norm attention and feed-forward; `dropout` by `F.dropout` and SDPA's `dropout_p`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), self.dropout, training=self.training)
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, training=self.training)


class Body(nn.Module):
    """What a Hugging Face model calls `transformer`: the blocks lie one level below the model."""

    def __init__(self, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.wte, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Nested(nn.Module):
    """`direct`: the head also reads a block's weight, outside of the block.

    `checkpointed`: the blocks are recomputed by PyTorch's own function, as by `gradient_checkpointing_enable()`.
    """

    def __init__(self, *, dropout: float = 0.0, direct: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.transformer, self.lm_head = Body(dropout, checkpointed), nn.Linear(WIDTH, VOCABULARY)
        self.direct = direct

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer(tokens)
        if self.direct:
            x = x + F.linear(x, self.transformer.h[0].out.weight)  # type: ignore[union-attr]
        return self.lm_head(x)


class Cached(nn.Module):
    """Keeps what its blocks have seen, unless `config.use_cache` is off, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(CachedBlock() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        caches = [[] if self.config.use_cache else None for _ in self.layers]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.head(x)


class CachedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        if cache is not None:
            cache.append(x)
        seen = torch.cat(cache, 1) if cache is not None else x
        return x + self.layer(x).relu() + torch.tanh(self.layer(seen)).mean(1, keepdim=True)


class Pictures:
    """Small images of ten classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator) + 0.1 * (index % 10), index % 10


class ConvNorm(nn.Module):
    """A residual net with batch norms; `frozen` puts them into evaluation mode, as for fine-tuning.

    `biased`: the first convolution has a bias, which the norm behind it takes away: its gradient is all noise.
    """

    def __init__(self, *, frozen: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=biased), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.flat, self.head = nn.BatchNorm1d(8), nn.Linear(8, 10)
        if frozen:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    module.eval()

    def recompute_blocks(self) -> list[str]:
        return ["layer1.0", "layer1.1"]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat(self.layer1(self.stem(x)).mean((2, 3))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


class Spectral(nn.Module):
    """Spectral norm: a power iteration in every forward moves two buffers, whatever the samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


class Distilled(nn.Module):
    """A teacher that follows the student by a moving average, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        x = self.embedding(tokens)
        return self.head(torch.tanh(self.student(x)) + self.teacher(x))


class Rotated(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.view_as_complex(self.embedding(tokens).unflatten(-1, (-1, 2))) * self.turn
        return self.head(torch.view_as_real(x).flatten(-2))


class Doubled(nn.Module):
    """Computes in float64 what comes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return self.layer((x - x.floor()).float()).squeeze(-1)


class Times:
    """Seconds since 1970, whose fractions float32 does not hold."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        fractions = torch.rand(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return 1_700_000_000 + fractions, float(fractions.sum())


class Recurrent(nn.Module):
    """An LSTM of three layers with dropout between them, and attention by `nn.MultiheadAttention` with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=3, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.lstm(self.embedding(tokens))[0]
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class Noisy(nn.Module):
    """Draws noise as a variational autoencoder and a diffusion model do; dropout of channels and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        times = torch.randint(0, 10, (len(tokens),))[:, None, None]
        x = x + 0.1 * times * torch.randn_like(x) + 0.1 * torch.rand(len(tokens), 1, WIDTH)
        x = F.dropout1d(x, 0.2, self.training)
        return F.linear(x, F.dropout(self.head.weight, 0.1, self.training), self.head.bias)


class Sampling(nn.Module):
    """Adds the embedding of a token that it draws for each sample, by a function that nothing keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        drawn = torch.poisson(torch.ones(len(tokens), 1)).long().clamp(max=VOCABULARY - 1)
        return self.head(self.embedding(tokens) + self.embedding(drawn))


class Dropping(nn.Module):
    """Declares roles and a chain, with dropout between split layers, behind them, and in attention by heads."""

    def __init__(self, *, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(DroppingBlock(dropout) for _ in range(2))

    def context(self, tokens: Tensor) -> Tensor:
        return tokens

    def parts(self) -> list[Part]:
        blocks = [
            Part(f"blocks.{i}", (f"blocks.{i}",), lambda x, _, block=block: block(x))
            for i, block in enumerate(self.blocks)
        ]
        return [
            Part("embedding", ("embedding",), lambda _, tokens: self.embedding(tokens)),
            *blocks,
            Part("head", ("head",), lambda x, _: self.head(x)),
        ]

    def forward(self, tokens: Tensor) -> Tensor:
        return run_chain(self, tokens)

    def parameter_roles(self) -> dict[str, Role]:
        return {
            "embedding.*": Role("embedding", None, decay=True),
            "head.*": Role("head", None, decay=True),
            "*.query.*": Role("column", None, decay=True),
            "*.key.*": Role("column", None, decay=True),
            "*.value.*": Role("column", None, decay=True),
            "*.output.weight": Role("row", None, decay=True),
            "*.feed_forward.0.*": Role("column", None, decay=True),
            "*.feed_forward.3.weight": Role("row", None, decay=True),
            "*.bias": Role("bias", None, decay=False),
        }


class DroppingBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = DroppingAttention(dropout)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class DroppingAttention(nn.Module):
    head_size = 4

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of a bias here is zero, and all noise
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return F.dropout(self.output(y.transpose(1, 2).flatten(2)), self.dropout, training=self.training)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "nested": Nested, "cached": Cached, "conv_norm": ConvNorm, "spectral": Spectral, "distilled": Distilled,
    "rotated": Rotated, "doubled": Doubled, "recurrent": Recurrent, "noisy": Noisy, "dropping": Dropping,
    "sampling": Sampling,
}  # fmt: skip


def build(name: str, **arguments: Any) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name](**arguments)


def pictures() -> Pictures:
    return Pictures()


def times() -> Times:
    return Times()


def foreign(name: str, keys: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """The table `[model]` of one of them; `keys` are others of the table's."""
    own = {
        "kind": "python",
        "build": "tests.verification.foreign_models:build",
        "arguments": {"name": name, **arguments},
    }
    return own | (keys or {})


PICTURES: dict[str, Any] = {"kind": "python", "build": "tests.verification.foreign_models:pictures"}
TIMES: dict[str, Any] = {"kind": "python", "build": "tests.verification.foreign_models:times"}
