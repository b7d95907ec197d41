"""Speech in the shape of a conformer (arXiv:2005.08100) with CTC (Graves et al., ICML 2006): frames to symbols."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.models.attention import Attention

BANDS, FRAMES, SYMBOLS, SPOKEN, BLANK = 16, 48, 8, 5, 0


class Convolution(nn.Module):
    """A gated pointwise and a depthwise convolution over time, `[batch, frames, width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.time = nn.Conv1d(width, width, 7, padding=3, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.gate(self.norm(x)), dim=-1).transpose(1, 2)
        return x + self.out(F.silu(self.time(y)).transpose(1, 2))


class Block(nn.Module):
    """Attention between two halves of a feed-forward, then the convolution."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.norm, self.attention, self.convolution = nn.LayerNorm(width), Attention(width, heads), Convolution(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x) / 2
        x = self.convolution(x + self.attention(self.norm(x)))
        return x + self.last(x) / 2


class Conformer(nn.Module):
    """Spectrograms `[batch, frames, bands]` to logits `[batch, frames / 2, symbols + 1]`, the blank first."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.halve = nn.Conv1d(BANDS, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS + 1)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.halve(frames.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)))


class Utterances:
    """Five symbols, each a bump over its bands for 5 to 9 frames, in noise."""

    def __init__(self, samples: int, first: int) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        symbols = torch.randint(1, SYMBOLS + 1, (SPOKEN,), generator=generator)
        lengths = torch.randint(5, 10, (SPOKEN,), generator=generator)
        frames = 0.3 * torch.randn(FRAMES, BANDS, generator=generator)
        at = 0
        for symbol, length in zip(symbols.tolist(), lengths.tolist(), strict=True):
            bump = torch.exp(-((torch.arange(BANDS) - 2 * symbol + 0.5) ** 2) / 2)
            frames[at : at + length] += bump * torch.sin(torch.linspace(0, torch.pi, length))[:, None]
            at += length
        return frames, symbols


def build(width: int = 48, depth: int = 2, heads: int = 4) -> Conformer:
    """The module of the run file."""
    return Conformer(width, depth, heads)


def ctc() -> Callable[[Tensor, Tensor], Tensor]:
    """Negative log-likelihood of each sample's symbols over all alignments, shared among them: `[batch, symbols]`."""

    def loss(logits: Tensor, symbols: Tensor) -> Tensor:
        scores, samples = logits.log_softmax(-1).transpose(0, 1), len(symbols)
        frames, spoken = torch.full((samples,), scores.shape[0]), torch.full((samples,), symbols.shape[1])
        nats = F.ctc_loss(scores, symbols, frames, spoken, blank=BLANK, reduction="none")
        return (nats / SPOKEN)[:, None].expand(-1, SPOKEN)

    return loss


def utterances() -> tuple[Utterances, Utterances]:
    """Training and held-out utterances."""
    return Utterances(8_000, 0), Utterances(400, 10**6)
