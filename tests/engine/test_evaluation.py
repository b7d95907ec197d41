"""Evaluation with exact weights, however the samples are shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.data.feed import evaluation_batches
from shoal.engine.compute import Compute
from shoal.engine.forward_backward import SequentialForwardBackward, evaluate
from shoal.engine.loss import cross_entropy
from shoal.engine.precision import Precision
from shoal.engine.randomness import Randomness
from tests.comm.groups import replicas
from tests.engine.same_math import Pictures, Sentences, own_module

SUM_ORDER = 1e-6  # float32 losses of samples in other batches


class Flat(nn.Module):
    """A linear classifier of pictures."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))


def evaluated(place, sentences: bool, micro: int | None, limit: int | None) -> dict[str, float]:
    mesh = replicas(place)
    source = Sentences() if sentences else Pictures()
    batches = evaluation_batches(
        source, replicas=place.size, replica=place.rank, micro_samples=micro, limit=limit, denominator="auto"
    )
    model = own_module() if sentences else Flat()
    model.train()
    device = torch.device("cpu")
    randomness = Randomness(model, seed=0, replica=0)
    compute = Compute(model, cross_entropy, Precision(torch.float32, None), device, randomness)
    values = evaluate(SequentialForwardBackward(compute), batches, group=mesh.world, device=device)
    assert model.training, "evaluation must leave the mode as it was"
    return values


@pytest.mark.parametrize("sentences", [True, False])
@pytest.mark.parametrize("limit", [None, 2])
def test_ranks_and_batches_change_nothing(ranks, sentences: bool, limit: int | None) -> None:
    """One rank at once, three ranks in twos (more ranks than samples too): the same loss, the same accuracy."""
    (want,) = ranks(1, evaluated, sentences, None, limit)
    for got in ranks(3, evaluated, sentences, 2, limit):
        assert got.keys() == want.keys()
        assert got == pytest.approx(want, rel=SUM_ORDER)
    assert ("accuracy/eval" in want) is not sentences


def test_the_loss_is_the_mean_over_tokens(ranks) -> None:
    """The reference by hand: every token of every sentence counts once."""
    model, total, count = own_module(), 0.0, 0
    for index in range(len(Sentences())):
        inputs, targets = Sentences()[index]
        total += float(cross_entropy(model(inputs[None]), targets[None]).sum().detach())
        count += len(targets)
    (values,) = ranks(1, evaluated, True, None, None)
    assert values["loss/eval"] == pytest.approx(total / count, rel=SUM_ORDER)
