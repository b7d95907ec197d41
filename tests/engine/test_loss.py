"""Losses as weighted sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal.engine.loss import call_model, cross_entropy, squared_error, weighted_sum
from shoal.errors import UserCodeError


def test_cross_entropy_is_pytorchs_one_value_a_target() -> None:
    """For classes and for sequences; -100 is ignored; half precision is computed in float32."""
    logits, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    targets[0, 0] = -100
    losses = cross_entropy(logits, targets)
    assert losses.shape == (3, 5)
    assert losses[0, 0] == 0
    assert torch.equal(losses[1], F.cross_entropy(logits[1], targets[1], reduction="none"))
    assert cross_entropy(logits.bfloat16(), targets).dtype == torch.float32


def test_what_weighs_nothing_does_not_count_even_when_it_is_infinite() -> None:
    """A padded position with an infinite loss leaves the sum and its gradient finite."""
    losses = torch.tensor([1.0, float("inf"), 3.0], requires_grad=True)
    total = weighted_sum(losses, torch.tensor([1.0, 0.0, 2.0]))
    total.backward()
    assert total == 7
    assert losses.grad is not None
    assert losses.grad.tolist() == [1, 0, 2]


def test_what_is_behind_the_weights_is_averaged() -> None:
    """A loss per number of a sample, with a weight per sample: the sample's mean counts."""
    losses = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    assert weighted_sum(losses, torch.tensor([1.0, 10.0])) == 2 + 60


@pytest.mark.parametrize("losses", [torch.tensor(1.0), torch.ones(3), torch.ones(2, 3), "a text", None])
def test_a_loss_of_another_shape_is_refused(losses) -> None:
    """A mean, a loss of another length or no tensor at all: the sentence says what is wanted."""
    if isinstance(losses, torch.Tensor) and losses.shape == (2, 3):
        assert weighted_sum(losses, torch.ones(2)) == 2
        return
    with pytest.raises(UserCodeError, match="one value per sample"):
        weighted_sum(losses, torch.ones(2))


def test_outputs_that_do_not_fit_the_targets_are_refused() -> None:
    """Cross-entropy and the squared error name both shapes."""
    with pytest.raises(UserCodeError, match=r"\(2, 3\).*\(2, 4\)"):
        cross_entropy(torch.ones(2, 3), torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(UserCodeError, match=r"\(2, 1\).*\(2,\)"):
        squared_error(torch.ones(2, 1), torch.ones(2))


def test_inputs_become_arguments() -> None:
    """A tuple is positional arguments, a mapping keywords, a tensor the one argument."""

    def model(a, b=1):
        return a, b

    assert call_model(model, (2, 3)) == (2, 3)
    assert call_model(model, {"a": 4, "b": 5}) == (4, 5)
    assert call_model(model, 6) == (6, 1)


def test_half_precision_is_summed_in_float32() -> None:
    """Four thousand float16 losses of 30 sum to 120,000, which float16 cannot hold."""
    total = weighted_sum(torch.full((4000,), 30.0, dtype=torch.float16), torch.ones(4000))
    assert total.dtype == torch.float32
    assert total == 120_000
    assert squared_error(torch.full((2,), 300.0, dtype=torch.float16), torch.zeros(2)).tolist() == [90_000.0, 90_000.0]


@pytest.mark.parametrize(
    ("targets", "words"),
    [(torch.tensor([0.0, 1.0]), "squared_error"), (torch.tensor([0, 5]), "between 0 and 5.*3 classes")],
)
def test_targets_that_are_no_classes_are_named(targets, words: str) -> None:
    """Floating targets, and classes beyond the model's: the two commonest mistakes."""
    with pytest.raises(UserCodeError, match=words):
        cross_entropy(torch.ones(2, 3), targets)
