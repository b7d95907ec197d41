"""What a loss says of itself: a sum, and a mean over other things than samples, do not pass for a mean over samples."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import UserCodeError
from shoal.own_loop.losses import Doubts, LossKind, Place, check_loss, doubt, kind_of

SAMPLES = 6
WEIGHTS = [
    torch.ones(256, 4, requires_grad=True),
    torch.ones(8, 3, requires_grad=True),
    torch.ones(3, requires_grad=True),
]
TASKS = torch.ones(SAMPLES, requires_grad=True)

Loss = Callable[[Tensor, Tensor], Tensor]
MEANS: dict[str, Loss] = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y),
    "smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "squares": lambda out, y: F.mse_loss(out, torch.ones_like(out)),
    "two terms": lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean(),
    "divided by hand": lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y),
    "times a reciprocal": lambda out, y: out.square().sum() * (1 / len(out)),
    "sums of features, averaged": lambda out, y: out.square().sum(1).mean(),
    "a stack of losses": lambda out, y: torch.stack([F.cross_entropy(out, y)] * SAMPLES).sum(),
    "a stack of losses, weighed": lambda out, y: (
        TASKS.neg().exp() * torch.stack([F.cross_entropy(out, y)] * SAMPLES) + TASKS
    ).sum(),
    "a masked mean with as many of each sample": lambda out, y: (out * masked(out, 2)).sum() / masked(out, 2).sum(),
    "a small penalty on outputs": lambda out, y: F.cross_entropy(out, y) + 1e-4 * out.square().sum(),
    "a penalty on weights": lambda out, y: F.cross_entropy(out, y) + 0.01 * sum(p.abs().sum() for p in WEIGHTS),
    "a squared one": lambda out, y: 0.5 * sum(p.pow(2).sum() for p in WEIGHTS) + F.cross_entropy(out, y),
    "of groups of weights": lambda out, y: F.cross_entropy(out, y) + (WEIGHTS[0] * WEIGHTS[0]).sum(1).sqrt().sum(),
    "of weights together": lambda out, y: (
        F.cross_entropy(out, y) + torch.cat([p.view(-1) for p in WEIGHTS]).abs().sum()
    ),
    "all targets counted": lambda out, y: F.cross_entropy(out, y, ignore_index=-100),
}
SUMS: dict[str, Loss] = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "squares": lambda out, y: F.mse_loss(out, torch.ones_like(out), reduction="sum"),
    "of a variational autoencoder": lambda out, y: (
        F.binary_cross_entropy(out.sigmoid(), torch.ones_like(out), reduction="sum")
        - 0.5 * torch.sum(1 + out - out.exp())
    ),
    "behind a mean": lambda out, y: out.square().mean() + F.cross_entropy(out, y, reduction="sum"),
    "of a policy": lambda out, y: (-out.log_softmax(1)[:, 0] * y).sum(),
    "of weights and samples": lambda out, y: ((out.detach()[:, :1] * WEIGHTS[0][0]) - 1).square().sum(),
    "of weights next to samples": lambda out, y: (WEIGHTS[2] - out.detach()).square().sum(),
    "of a layer": lambda out, y: (out.detach()[:, :1] @ WEIGHTS[0][:1]).abs().sum(),
    "halved": lambda out, y: F.cross_entropy(out, y, reduction="sum") / 2,
}
MEANS_FOR_SUMS: dict[str, Loss] = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y),
    "squares": lambda out, y: F.mse_loss(out, torch.ones_like(out)),
    "by hand": lambda out, y: out.square().mean(),
    "and a part": lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean(),
}
SUMS_AS_SAID: dict[str, Loss] = {
    "times the samples": lambda out, y: F.cross_entropy(out, y) * len(y),
    "a share of the global batch": lambda out, y: F.cross_entropy(out, y) * (len(y) / 24),
    "and a mean": lambda out, y: F.cross_entropy(out, y, reduction="sum") + out.square().mean(),
    "of something else": lambda out, y: torch.logsumexp(out, (0, 1)) + out.square().mean(),
}
OF_OTHERS: dict[str, Loss] = {
    "ignored targets": lambda out, y: F.cross_entropy(out, y.where(y > 0, -100)),
    "ignored targets, smoothed": lambda out, y: F.cross_entropy(out, y.where(y > 0, -100), label_smoothing=0.1),
    "weights of classes": lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([0.3, 1.0, 3.0])),
    "a mask": lambda out, y: (out * (out > 0)).sum() / (out > 0).sum(),
    "pixels": lambda out, y: F.cross_entropy(
        out[..., None, None], y.where(y > 0, 255)[:, None, None], ignore_index=255
    ),
}


def masked(out: Tensor, counted: int) -> Tensor:
    """A mask of so many numbers of each sample."""
    return (torch.arange(out.shape[1]) < counted).expand_as(out)


def outputs_of(samples: int) -> Tensor:
    """Of a layer without a bias."""
    return torch.randn(samples, 3) @ torch.eye(3, requires_grad=True)


def said_of(loss: Loss, kind: LossKind = "mean") -> str:
    torch.manual_seed(0)
    return doubt(loss(outputs_of(SAMPLES), torch.tensor([0, 1, 2, 1, 2, 1])), SAMPLES, kind) or ""


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_is_one(name: str) -> None:
    assert said_of(MEANS[name]) == ""


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples_is_seen(name: str) -> None:
    assert "looks like a sum over the samples" in said_of(SUMS[name])


def test_a_penalty_on_weights_is_no_sum_over_many_samples() -> None:
    loss = F.cross_entropy(outputs_of(256), torch.zeros(256, dtype=torch.int64)) + 0.01 * sum(
        p.abs().sum() for p in WEIGHTS
    )
    assert doubt(loss, 256) is None


@pytest.mark.parametrize("name", MEANS_FOR_SUMS)
def test_a_mean_that_is_said_to_be_a_sum_is_seen(name: str) -> None:
    assert "the loss is a mean" in said_of(MEANS_FOR_SUMS[name], "sum")


@pytest.mark.parametrize("name", [*SUMS, *SUMS_AS_SAID])
def test_a_sum_may_be_said_to_be_one(name: str) -> None:
    assert said_of((SUMS | SUMS_AS_SAID)[name], "sum") == ""


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_mean_over_other_things_is_seen(name: str) -> None:
    assert "backward(loss, weight=...)" in said_of(OF_OTHERS[name])


def test_a_microbatch_of_one_sample_tells_nothing() -> None:
    assert doubt(torch.ones(1, requires_grad=True).square().sum(), 1) is None


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (torch.ones(2, requires_grad=True), "of shape (2,)"),
        (0.5, "of type float"),
        (torch.ones(()), "without a gradient"),
    ],
)
def test_what_has_no_gradient_is_refused(loss: object, sentence: str) -> None:
    with pytest.raises(UserCodeError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        check_loss(loss)


@pytest.mark.parametrize(("weight", "reduction"), [(None, "total"), (3.0, "sum")])
def test_a_reduction_is_a_mean_or_an_unweighed_sum(weight: float | None, reduction: str) -> None:
    with pytest.raises(UserCodeError):
        kind_of(weight, reduction)


def test_a_loss_of_many_terms_is_looked_at_term_by_term() -> None:
    """As of a recurrent model, a loss for each of its steps in time."""
    out = outputs_of(SAMPLES)
    means = sum((out * time).square().mean() for time in range(3000))
    assert isinstance(means, Tensor)
    assert doubt(means, SAMPLES) is None
    assert "looks like a sum" in (doubt(out.square().sum() + means, SAMPLES) or "")


def test_what_must_be_fetched_for_the_backward_is_left_for_it() -> None:
    """Some that move activations to the host give them back once."""
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> int:
        held[number := len(held)] = tensor
        return number

    with torch.autograd.graph.saved_tensors_hooks(keep, held.pop):
        out = torch.randn(SAMPLES, 3, requires_grad=True)
        loss = F.cross_entropy(out, torch.zeros(SAMPLES, dtype=torch.int64)) / (out > 9).sum().clamp(min=1)
        loss = loss + F.mse_loss(out, torch.ones_like(out), reduction="sum")
    assert doubt(loss, SAMPLES) is None
    loss.backward()


def test_a_graph_that_was_freed_tells_nothing() -> None:
    out = torch.randn(SAMPLES, 3, requires_grad=True)
    loss = F.cross_entropy(out, torch.zeros(SAMPLES, dtype=torch.int64))
    loss.backward()
    assert doubt(loss, SAMPLES) is None


def logits_of(numbers: int) -> Tensor:
    return torch.randn(numbers, 3) @ torch.eye(3, requires_grad=True)


def mean_of(numbers: int) -> Tensor:
    """A cross-entropy of what a mask has left, or of the nodes of some graphs."""
    return F.cross_entropy(logits_of(numbers), torch.zeros(numbers, dtype=torch.int64))


Looks = list[tuple[Tensor, int, Place]]
"""A loss, samples of its microbatch, and where the loop is."""


def places(*losses: Tensor, samples: int = SAMPLES, each: int = 1) -> Looks:
    """One microbatch a step, with so many losses each."""
    return [(loss, samples, Place(1 + at // each, "microbatch 1 of 1", 0)) for at, loss in enumerate(losses)]


UNEVEN: dict[str, Looks] = {
    "positions of a mask": places(mean_of(11), mean_of(14)),
    "by hand": places(logits_of(11).square().mean(), logits_of(14).square().mean()),
    "the second of two losses": places(mean_of(6), mean_of(11), mean_of(6), mean_of(14), each=2),
    "two terms": places(mean_of(6) + mean_of(11), mean_of(6) + mean_of(13)),
    "nodes of fewer graphs": [(mean_of(20), 6, Place(1, "a", 0)), (mean_of(13), 4, Place(1, "b", 0))],
    "of the second optimizer": [
        (mean_of(6), 6, Place(1, "a", 0)),
        (mean_of(11), 6, Place(1, "a", 1)),
        (mean_of(6), 6, Place(2, "a", 0)),
        (mean_of(13), 6, Place(2, "a", 1)),
    ],
}
EVEN: dict[str, Looks] = {
    "samples": places(mean_of(6), mean_of(6)),
    "images that grow": places(mean_of(6 * 16), mean_of(6 * 25)),
    "a fixed set beside the samples": [(mean_of(7), 6, Place(1, "a", 0)), (mean_of(7), 4, Place(1, "b", 0))],
    "two losses": places(mean_of(6), mean_of(7), mean_of(6), mean_of(7), each=2),
    "two optimizers, a pass each": [
        (mean_of(6), 6, Place(1, "a", 0)),
        (mean_of(6), 6, Place(1, "b", 0)),
        (mean_of(7), 6, Place(1, "a", 1)),
        (mean_of(7), 6, Place(1, "b", 1)),
    ],
    "a term that comes later": places(mean_of(6), mean_of(6) + mean_of(7)),
    "in a third step": places(mean_of(6), mean_of(6), mean_of(7)),
}


def warned(looks: Looks) -> list[str]:
    said: list[str] = []
    doubts, pending = Doubts(said.append, None), SimpleNamespace(number=1, samples=24)
    for loss, samples, place in looks:
        pending.number = place.step
        doubts.look(loss, "mean", place, cast(Any, pending), lambda samples=samples: samples)
    return said


@pytest.mark.parametrize("name", UNEVEN)
def test_a_mean_over_more_numbers_of_as_many_samples_is_seen(name: str) -> None:
    """Which no single microbatch shows: in the second that a rank computes."""
    (said,) = warned(UNEVEN[name])
    assert "backward(loss, weight=...)" in said


@pytest.mark.parametrize("name", EVEN)
def test_a_mean_over_as_many_numbers_of_each_sample_is_none_of_them(name: str) -> None:
    """Nor one over a set that has nothing to do with samples. Two microbatches are looked at, of each loss."""
    assert warned(EVEN[name]) == []
