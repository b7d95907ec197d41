"""A step whose end is not waited for: what it does with losses and gradients that are not finite, and with saves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collective import Alone
from shoal.comm.ledger import Ledger
from shoal.data.sample import Batch
from shoal.engine.compute import Compute
from shoal.engine.config import Float32
from shoal.engine.forward_backward import SequentialForwardBackward
from shoal.engine.loss import squared_error
from shoal.engine.precision import Precision, scaler_of
from shoal.engine.randomness import Randomness
from shoal.engine.rank_context import RankContext
from shoal.engine.step import TrainStep
from shoal.engine.updates import ByBucket
from shoal.errors import Diverged, UserCodeError
from shoal.gradients.config import GradientsConfig
from shoal.gradients.priority import PriorityGradients
from shoal.optim.build import build_optimizer
from shoal.optim.config import SGD
from shoal.sync.strategy import AlwaysEqual
from tests.gradients.buckets import replicated

CPU, LR = torch.device("cpu"), 0.1


class Poisoned(torch.autograd.Function):
    """Passes its input on; its gradient is infinite."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * math.inf


class Net(nn.Module):
    """Two layers; `gradient` poisons that of the first, `astray` uses the second without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.gradient = self.astray = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = Poisoned.apply(x) if self.gradient else x
        return nn.functional.linear(x, self.second.weight) if self.astray else self.second(x)


def training() -> tuple[Net, TrainStep]:
    """One process, past the first steps."""
    net, config = Net(), GradientsConfig(schedule="priority", partition_bytes=40, credit_bytes=80)
    gradients = PriorityGradients(config, replicated(net.named_parameters()), model=net, lane=Alone(), ledger=Ledger())
    randomness = Randomness(net, seed=0, replica=0)
    context = RankContext(
        SequentialForwardBackward(Compute(net, squared_error, Precision(torch.float32, None), CPU, randomness)),
        lockstep=Alone(),
        data_parallel_group=Alone(),
        ledger=Ledger(),
        scaler=scaler_of(Float32()),
    )
    optimizer = build_optimizer(SGD(lr=LR), [(n, p, True) for n, p in net.named_parameters()], lr=LR)
    step = TrainStep(context, ByBucket(gradients, optimizer), AlwaysEqual())
    for number in range(1, 5):
        step(number, [batch()], lr=LR)
    assert not gradients.rehearses
    return net, step


def batch(value: float = 1.0) -> Batch:
    return Batch(torch.full((2, 3), value), torch.ones(2, 2), weights=torch.ones(2), positions=torch.arange(2))


def weights(net: Net) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def test_the_update_comes_with_the_next_forward() -> None:
    """After a step the weights are those before it; when it is settled, or the model has run, they are new."""
    net, step = training()
    step.settle()
    before = weights(net)
    step(5, [batch()], lr=LR)
    assert all(torch.equal(a, b) for a, b in zip(weights(net), before, strict=True))
    net(torch.ones(1, 3))
    after = weights(net)
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    step.settle()
    assert all(torch.equal(a, b) for a, b in zip(weights(net), after, strict=True))


def test_a_loss_that_is_not_finite_is_skipped() -> None:
    """It is known before any update."""
    net, step = training()
    step.settle()
    before = weights(net)
    result = step(5, [batch(math.nan)], lr=LR)
    step.settle()
    assert not result.committed
    assert not math.isfinite(float(step.gradients.norm))
    assert all(torch.equal(a, b) for a, b in zip(weights(net), before, strict=True))
    assert step(6, [batch()], lr=LR).committed


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    """Where its loss was finite; by the number of its step, and before it is applied to what it is of."""
    net, step = training()
    step.settle()
    first = net.first.weight.detach().clone()
    net.gradient = True
    assert step(5, [batch()], lr=LR).committed
    with pytest.raises(Diverged, match="step 5 had a finite loss and a gradient that is not finite"):
        step(6, [batch()], lr=LR)
    assert torch.equal(net.first.weight, first)


def test_a_parameter_that_goes_astray_later_is_refused() -> None:
    """Used without its module after the first steps, it may be older than the others: named, in that very step."""
    net, step = training()
    net.astray = True
    with pytest.raises(UserCodeError, match=r"second\.weight was used without calling the module"):
        step(5, [batch()], lr=LR)
