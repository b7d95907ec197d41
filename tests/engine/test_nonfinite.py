"""Who was not finite first: one culprit planted at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.data.sample import Batch
from shoal.engine.compute import Compute
from shoal.engine.loss import cross_entropy
from shoal.engine.precision import Precision
from shoal.engine.randomness import Randomness
from shoal.engine.recovery import first_nonfinite


class Net(nn.Module):
    """Three layers; `poison` makes the second one's output infinite."""

    def __init__(self, *, poison: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.poison = poison

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.middle(self.first(x)))

    def middle(self, x: Tensor) -> Tensor:
        return self.second(x * float("inf") if self.poison else x)


def batch() -> Batch:
    return Batch(
        torch.ones(4, 2), torch.zeros(4, dtype=torch.int64), weights=torch.ones(4), positions=torch.arange(10, 14)
    )


def culprit(model: nn.Module, samples: Batch, loss=cross_entropy, ids=None) -> str | None:
    randomness = Randomness(model, seed=0, replica=0)
    compute = Compute(model, loss, Precision(torch.float32, None), torch.device("cpu"), randomness)
    return first_nonfinite(compute, [samples], ids=ids)


def test_finite_everywhere_names_nobody() -> None:
    """Nothing is found where nothing is wrong."""
    assert culprit(Net(), batch()) is None


def test_a_sample_is_named_by_its_position() -> None:
    """The first sample with a NaN, by its place in the data's order."""
    samples = batch()
    samples.inputs[2, 1] = float("nan")
    assert culprit(Net(), samples) == "the inputs of the sample at position 12 of the data's order"
    assert culprit(Net(), samples, ids=lambda positions: positions + 500) == (
        "the inputs of sample 512 at position 12 of the data's order"
    )


def test_a_parameter_is_named() -> None:
    """An infinite parameter, before anything that it causes."""
    model = Net()
    model.second.bias.data[0] = float("inf")
    assert culprit(model, batch()) == "parameter second.bias"


def test_a_module_is_named_by_its_output() -> None:
    """The first module whose output is not finite, from finite inputs and parameters."""
    assert culprit(Net(poison=True), batch()) == "the output of module second (Linear)"


class OwnForward(Net):
    """Its modules' outputs are finite, its own is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0.0


def test_a_model_s_own_forward_is_named() -> None:
    """Not the loss, which only follows."""
    found = culprit(OwnForward(), batch())
    assert found == "the output of the model (OwnForward) itself, from finite outputs of its modules"


def test_the_loss_is_named() -> None:
    """Finite outputs, and a loss that is not."""
    found = culprit(Net(), batch(), loss=lambda outputs, targets: outputs[:, 0] * float("nan"))
    assert found == "the loss, from finite outputs of the model"


def test_a_gradient_is_named() -> None:
    """Only a gradient is not finite."""
    model = Net()
    model.third.weight.grad = torch.full_like(model.third.weight, float("nan"))
    assert culprit(model, batch()) == "the gradient of parameter third.weight"
