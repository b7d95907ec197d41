"""One small run on any number of ranks, for tests that compare layouts: a user's own module, samples of any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collective import Alone
from shoal.comm.conditions import Conditions
from shoal.comm.mesh import Mesh
from shoal.data.config import Denominator
from shoal.data.feed import Feed, StepShare
from shoal.data.order import Order
from shoal.engine.compute import Compute
from shoal.engine.config import Float32, Float64, PrecisionConfig
from shoal.engine.forward_backward import SequentialForwardBackward
from shoal.engine.loss import cross_entropy
from shoal.engine.precision import precision_of, scaler_of
from shoal.engine.randomness import Randomness
from shoal.engine.rank_context import RankContext
from shoal.engine.step import TrainStep
from shoal.engine.transforms import clip_by_global_norm
from shoal.engine.updates import AtOnce
from shoal.gradients.config import GradientsConfig
from shoal.gradients.replicated import ReplicatedGradients
from shoal.models.build import build, initialise
from shoal.models.config import ConvNetConfig, GPTConfig
from shoal.optim.build import build_optimizer
from shoal.optim.config import SGD, AdamW, OptimizerConfig
from shoal.sync.strategy import AlwaysEqual
from tests.comm.groups import replicas
from tests.gradients.buckets import replicated
from tests.ranks import TestPlace

VOCABULARY = 17


class Sentences:
    """Samples of 1 to 9 tokens; the same whoever reads them."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, VOCABULARY, (2 + index % 9,), generator=generator)
        return tokens[:-1], tokens[1:]


class Weighted(Sentences):
    """The same with a weight of the user's for each sample, 0 for some."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = super().__getitem__(index)
        return inputs, targets, torch.tensor(float(index % 4))


class Pictures:
    """Small images of two classes."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 8, 8, generator=generator) + index % 2, index % 2


class OwnModule(nn.Module):
    """A user's module: no base class of ours, a recurrent net, a parameter that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.recurrent = nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def own_module() -> nn.Module:
    torch.manual_seed(5)
    return OwnModule()


def gpt(dropout: float = 0.0) -> nn.Module:
    """Shoal's GPT, drawn by key."""
    with torch.device("meta"):
        model = build(
            GPTConfig(vocabulary=VOCABULARY, layers=2, width=16, heads=4, kv_heads=2, dropout=dropout, tied=True)
        )
    initialise(model, seed=3, device=torch.device("cpu"), dtype=torch.float32)
    return model


def dropping_gpt() -> nn.Module:
    return gpt(0.3)


def grouped_net() -> nn.Module:
    """The convolutional net with batch statistics over groups of three samples."""
    with torch.device("meta"):
        model = build(ConvNetConfig(classes=2, width=8, norm="batch", group_samples=3))
    initialise(model, seed=3, device=torch.device("cpu"), dtype=torch.float32)
    return model


PLAIN, ADAM = SGD(lr=0.5), AdamW(lr=3e-3, weight_decay=0.1)
SINGLE, EXACT = Float32(), Float64()


@dataclass(frozen=True)
class Case:
    """What is trained; everything that is not in it may differ between two layouts."""

    model: Any = own_module
    data: Any = Sentences
    optimizer: OptimizerConfig = PLAIN
    precision: PrecisionConfig = SINGLE
    denominator: Denominator = "auto"
    global_samples: int = 12
    group: int = 1
    steps: int = 8
    clip_norm: float | None = 0.5


def trajectory(
    place: TestPlace, case: Case, micro_samples: int | None, conditions: Conditions | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of `case` on this rank's world."""
    mesh = replicas(place, conditions=conditions)
    step = train_step(case, mesh)
    losses, norms = [], []
    with feed(case, mesh, micro_samples) as source:
        for number in range(1, case.steps + 1):
            result = step(number, source.next().microbatches, lr=case.optimizer.lr)
            losses.append(result.loss)
            norms.append(result.norm)
    return losses, norms, {name: tensor.clone() for name, tensor in step.context.model.state_dict().items()}


def train_step(case: Case, mesh: Mesh) -> TrainStep:
    """The step of the engine, put together by hand."""
    precision = precision_of(case.precision)
    model = case.model().to(precision.parameters)
    parameters = list(model.named_parameters())
    randomness, device = Randomness(model, seed=7, replica=mesh.batch_share[0]), torch.device("cpu")
    context = RankContext(
        SequentialForwardBackward(Compute(model, cross_entropy, precision, device, randomness)),
        lockstep=mesh.world,
        data_parallel_group=mesh.axis("replicate"),
        ledger=mesh.ledger,
        scaler=scaler_of(case.precision),
    )
    gradients = ReplicatedGradients(
        GradientsConfig(bucket_bytes=2000, first_bucket_bytes=500),
        replicated(parameters, rank=mesh.rank, size=mesh.world.size),
        ranks=lambda holding: holding.sums,
        groups=mesh.ranks,
        replica=Alone(),
    )
    optimizer = build_optimizer(case.optimizer, [(n, p, p.ndim > 1) for n, p in parameters], lr=case.optimizer.lr)
    transforms = [] if case.clip_norm is None else [clip_by_global_norm(case.clip_norm)]
    return TrainStep(context, AtOnce(gradients, optimizer, transforms=transforms), AlwaysEqual())


def feed(case: Case, mesh: Mesh, micro_samples: int | None) -> Feed:
    """This rank's microbatches."""
    data = case.data()
    return Feed(
        data,
        Order(len(data), seed=1),
        StepShare(case.global_samples, *mesh.batch_share, micro_samples=micro_samples, group=case.group),
        denominator=case.denominator,
    )


def alone(case: Case, micro_samples: int | None = None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The reference: one process, in this one."""
    import torch.distributed as dist

    return trajectory(TestPlace(0, 1, dist.HashStore()), case, micro_samples)
