"""A small model, and its training under a layout with a sync: what the tests of syncs compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.comm.conditions import Conditions
from shoal.comm.config import WireConfig
from shoal.comm.mesh import Mesh, build_mesh
from shoal.gradients.build import Summing, build_gradients
from shoal.gradients.config import GradientsConfig
from shoal.gradients.gradients import Gradients
from shoal.gradients.masters import MixedPrecision, narrowed
from shoal.optim.build import build_optimizer
from shoal.optim.config import SGD, AdamW, OptimizerConfig
from shoal.state import Trained
from shoal.topology.holding import held
from shoal.topology.layout import INSIDE_REPLICA, Layout
from tests.ranks import TestPlace

WORDS, WIDTH, SAMPLES, LENGTH = 13, 6, 24, 4
BUCKETS = GradientsConfig(bucket_bytes=900, first_bucket_bytes=300)
MOMENTUM = SGD(lr=0.1, momentum=0.9)


class Block(nn.Module):
    """A residual layer with a parameter of one number. `skipped` is used by some samples only, `unused` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.skipped = nn.Parameter(torch.randn(3, WIDTH))
        self.unused = nn.Parameter(torch.randn(5))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        y = x + self.gate * torch.tanh(self.linear(self.norm(x)))
        return y + marked[:, None, None] * self.skipped.sum(0) if marked.any() else y


class Net(nn.Module):
    """Words to words; the head is the embedding if it is `tied` to it."""

    def __init__(self, blocks: int = 3, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for number, block in enumerate(self.blocks):
            x = block(x, words[:, 0] == number)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    """What is trained how. `zero` None is the all-reduce. `mixed`: with masters, and a head of its own, as PyTorch adds
    the two gradients of a tied weight in bfloat16.
    """

    layout: Layout = field(default_factory=Layout)
    zero: int | None = None
    accumulation: int = 1
    optimizer: OptimizerConfig = field(default_factory=lambda: AdamW(lr=0.01, weight_decay=0.1))
    steps: int = 6
    clip_norm: float = 0.05
    dtype: torch.dtype = torch.float64
    mixed: MixedPrecision | None = None


def synced(case: Case, mesh: Mesh, summing: Summing | None = None) -> tuple[Net, Gradients]:
    """The model of this rank, and what agrees on it."""
    net = Net(tied=case.mixed is None).to(case.dtype)
    trained = [
        Trained(held(case.layout, mesh.rank, name, tuple(p.shape)), p) for name, p in net.named_parameters()
    ]  # fmt: skip
    if case.mixed is not None:
        trained = narrowed(net, trained, case.mixed)
    sync = build_gradients(
        BUCKETS,
        trained,
        zero=case.zero,
        model=net,
        groups=mesh.ranks,
        replica=mesh.axis(*INSIDE_REPLICA),
        blocks=list(net.blocks),
        summing=summing,
    )
    return net, sync


def optimizer_of(case: Case, sync: Gradients) -> torch.optim.Optimizer:
    """Matrices decay."""
    owned = [(o.name, o.parameter, len(o.holding.global_shape) > 1) for o in sync.owned]
    return build_optimizer(case.optimizer, owned, lr=case.optimizer.lr)


def microbatches(case: Case, step: int, rank: int) -> Sequence[tuple[Tensor, Tensor]]:
    """The samples of a rank: the axes that split the batch split it evenly; weights differ from sample to sample."""
    layout = case.layout
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    weights = torch.rand(SAMPLES, generator=generator, dtype=torch.float64) / SAMPLES
    share = layout.group(("replicate", "shard", "context"), rank).index(rank)
    count = SAMPLES // layout.size(("replicate", "shard", "context"))
    mine = slice(share * count, (share + 1) * count)
    return list(zip(words[mine].chunk(case.accumulation), weights[mine].chunk(case.accumulation), strict=True))


def loss_of(net: nn.Module, words: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the samples' losses."""
    logits = net(words[:, :-1])
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none").sum(1)
    return (losses * weights.to(losses)).sum()


def trajectory(
    place: TestPlace, case: Case, conditions: Conditions | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The norms of all steps, and the parameters after them."""
    mesh = build_mesh(
        case.layout,
        place.rank,
        store=place.store,
        device=torch.device("cpu"),
        conditions=conditions,
        wire=WireConfig(timeout_s=180),
    )
    net, sync = synced(case, mesh)
    optimizer, norms = optimizer_of(case, sync), []
    for step in range(case.steps):
        norms.append(take_step(net, sync, optimizer, microbatches(case, step, mesh.rank), case.clip_norm))
    with sync.full_parameters():
        parameters = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    sync.close()
    return norms, parameters


def take_step(
    net: nn.Module,
    sync: Gradients,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    clip_norm: float,
) -> float:
    """One update; the norm of its gradient."""
    sync.start()
    for number, (words, weights) in enumerate(batches):
        loss = loss_of(net, words, weights)
        with sync.backward(last=number == len(batches) - 1):
            loss.backward()
    norm = float(sync.reduce())
    if norm > clip_norm:
        sync.scale(clip_norm / norm)
    optimizer.step()
    sync.gather()
    return norm


def plain(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """The reference: one process, one microbatch, PyTorch's own clipping and optimizer on the module's parameters."""
    net = Net().to(case.dtype)
    named = [(name, p, p.ndim > 1) for name, p in net.named_parameters()]
    optimizer, norms = build_optimizer(case.optimizer, named, lr=case.optimizer.lr), []
    alone = Case(zero=None)
    for step in range(case.steps):
        net.zero_grad()
        ((words, weights),) = microbatches(alone, step, 0)
        loss_of(net, words, weights).backward()
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])))
        factor = min(1.0, case.clip_norm / norms[-1])
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        optimizer.step()
    return norms, {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
