"""Models whose samples see each other, as users write them: no cut of the batch computes the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

VOCABULARY = 61
GROUP = 4


class Pairs:
    """Two noisy views of one point, for contrastive learning; the target is never read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], int]:
        generator = torch.Generator().manual_seed(index)
        point = torch.randn(8, generator=generator)
        first, second = (point + 0.1 * torch.randn(8, generator=generator) for _ in range(2))
        return (first, second), 0


class Contrastive(nn.Module):
    """The similarities `[samples, samples]` of all first views with all second views of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = (F.normalize(self.project(view), dim=-1) for view in (first, second))
        return a @ b.T / 0.2


class HomemadeBatchNorm(nn.Module):
    """Normalises by the mean and variance of the batch, without being a `BatchNorm`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-5).sqrt()
        return self.head(x)


class RouterLoss(nn.Module):
    """Two experts; the mean load of the batch, squared, goes into every sample's logits as a penalty would."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        loads = self.router(x).softmax(-1)
        return self.head(x * loads[..., :1]), loads.mean((0, 1)).square().sum()


class PaddedBiLSTM(nn.Module):
    """A bidirectional LSTM that reads the padding too: the backward direction begins in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return {
        "contrastive": Contrastive, "batch_norm": HomemadeBatchNorm, "router": RouterLoss, "bilstm": PaddedBiLSTM
    }[name]()  # fmt: skip


def pairs() -> Pairs:
    return Pairs()


def contrastive_loss():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, torch.arange(len(outputs)), reduction="none")

    return loss


def router_loss():
    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        logits, penalty = outputs
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape) + penalty

    return loss


class Towers(nn.Module):
    """Two towers, and the embeddings of both as a mapping; `gathered`: the second is compared with all ranks'."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        return {"first": F.normalize(self.first(first), dim=-1), "second": F.normalize(self.second(second), dim=-1)}


def towers() -> nn.Module:
    return Towers()


def clip_loss():
    """Symmetric cross-entropy over the similarities of all pairs of the global batch, one value per sample."""

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        everyone, own = shoal.gather_samples(outputs["second"])
        queries, _ = shoal.gather_samples(outputs["first"])
        forth = F.cross_entropy(outputs["first"] @ everyone.T / 0.2, own, reduction="none")
        back = F.cross_entropy(outputs["second"] @ queries.T / 0.2, own, reduction="none")
        return (forth + back) / 2

    return loss
