"""Six modules as users write them, which declare neither roles nor a chain, and one that cannot be split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 61, 16, 16


class FeedForward(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ResidualMLP(nn.Module):
    """Tokens through residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(FeedForward() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Heads split off by a constant, joined by -1."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, WIDTH // heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            layer(x).view(b, t, self.heads, self.head_width).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(8), FeedForward()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x), mask))


class Causal(nn.Module):
    """Learned positions, an assertion, and a mask that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        assert t <= LENGTH, "too long"
        places = torch.arange(t, device=tokens.device)
        mask = places[:, None] >= places
        x = self.embed(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Gated(nn.Module):
    """SwiGLU in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.RMSNorm(WIDTH), "gate": nn.Linear(WIDTH, 24), "up": nn.Linear(WIDTH, 24),
                 "down": nn.Linear(24, WIDTH)}
            )
            for _ in range(3)
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            y = layer["norm"](x)
            x = x + layer["down"](F.silu(layer["gate"](y)) * layer["up"](y))
        return self.head(x)


class PatchClassifier(nn.Module):
    """A small ViT: a token and positions that are parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks = nn.Sequential(*(AttentionBlock() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class Convolutions(nn.Module):
    """A convolutional net; of it the classifier alone splits over tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(images), 1))


class Packed(nn.Module):
    """Queries, keys and values in one matrix, whose width is read off the input: it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 48), nn.Linear(16, 16)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        return self.head(x + self.out(y))


class PackedAttention(nn.Module):
    """Queries, keys and values in one matrix, cut into blocks by an attribute, and heads split off by another."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.width, self.heads, self.head_width = WIDTH, heads, WIDTH // heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (part.view(b, t, self.heads, self.head_width).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class PackedFeedForward(nn.Module):
    """A gate and what it gates in one matrix without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 48, bias=False), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class PackedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = PackedAttention(8), nn.LayerNorm(WIDTH), PackedFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x))


class PackedCausal(nn.Module):
    """A causal transformer of packed layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(PackedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Images:
    """Random 8 x 8 images of ten classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index)), index % 10


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    models = [ResidualMLP, Causal, Gated, PatchClassifier, Convolutions, Packed, PackedCausal, ConvMLP]
    return next(model for model in models if model.__name__ == name)()


def gpt2() -> nn.Module:
    """GPT-2 of `transformers` with random weights: packed projections, weights `[in, out]`, a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class ConvMLP(nn.Module):
    """A feed-forward of GPT-2's layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.embed, self.up, self.down = nn.Embedding(VOCABULARY, WIDTH), Conv1D(40, WIDTH), Conv1D(WIDTH, 40)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def images() -> Images:
    return Images()
