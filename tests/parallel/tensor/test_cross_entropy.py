"""The loss over split logits is the loss over whole ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.errors import UserCodeError
from shoal.parallel.tensor.layers import uneven_cut
from shoal.parallel.tensor.vocabulary import VocabularySplit, gather_logits, vocabulary_cross_entropy
from tests.parallel.tensor.split import entropy, tensor_group, weighted
from tests.ranks import TestPlace

# Rounding of losses up to 100 in float64 and in float32, which bfloat16 logits become.
LOSS = {torch.float64: {"rtol": 1e-13, "atol": 1e-13}, torch.bfloat16: {"rtol": 1e-6, "atol": 1e-5}}
# Gradients are of order 1; that of a bfloat16 logit is rounded to bfloat16 once.
GRADIENT = {torch.float64: {"rtol": 1e-13, "atol": 1e-14}, torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6}}


def logits_and_targets(vocabulary: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits large enough to overflow without the maximum; some targets are left out."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(2, 5, vocabulary, generator=generator, dtype=torch.float64) * 20 + 800).to(dtype)
    targets = torch.randint(0, vocabulary, (2, 5), generator=generator)
    targets[0, 1] = targets[1, 4] = -100
    return logits, targets


def split_of(vocabulary: int, rank: int, size: int) -> VocabularySplit:
    cut = uneven_cut(vocabulary, rank, size)
    return VocabularySplit(cut.offset, cut.length, vocabulary)


def split_loss(place: TestPlace, vocabulary: int, dtype: torch.dtype, gather: bool) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of this rank's logits."""
    group, split = tensor_group(place), split_of(vocabulary, place.rank, place.size)
    whole, targets = logits_and_targets(vocabulary, dtype=dtype)
    own = whole[..., split.offset : split.offset + split.length].clone().requires_grad_()
    if gather:
        losses = entropy(gather_logits(own, split, group), targets)
    else:
        losses = vocabulary_cross_entropy(own, targets, split=split, group=group)
    weighted(losses).backward()
    return losses.detach().clone(), own.grad.clone()


@pytest.mark.parametrize("gather", [False, True], ids=["split", "gathered"])
@pytest.mark.parametrize(("world", "vocabulary"), [(2, 10), (4, 11), (4, 3)])
def test_losses_and_gradients_are_those_of_whole_logits(ranks, world: int, vocabulary: int, gather: bool) -> None:
    """Sizes that do not divide, and ranks without any token; -100 is left out."""
    check(ranks, world, vocabulary, dtype=torch.float64, gather=gather)


def test_half_precision_logits_have_losses_in_float32(ranks) -> None:
    check(ranks, 2, 11, dtype=torch.bfloat16, gather=False)


def check(ranks, world: int, vocabulary: int, *, dtype: torch.dtype, gather: bool) -> None:
    whole, targets = logits_and_targets(vocabulary, dtype=dtype)
    whole.requires_grad_()
    losses = entropy(whole.to(torch.promote_types(dtype, torch.float32)), targets)
    weighted(losses).backward()
    outcomes = ranks(world, split_loss, vocabulary, dtype, gather)
    for own_losses, _ in outcomes:
        assert own_losses.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(own_losses, losses.detach(), **LOSS[dtype])
    torch.testing.assert_close(torch.cat([grad for _, grad in outcomes], -1), whole.grad, **GRADIENT[dtype])


def wrong_target(place: TestPlace, target: int) -> str:
    group, split = tensor_group(place), split_of(11, place.rank, place.size)
    whole, targets = logits_and_targets(11, dtype=torch.float64)
    targets[0, 0] = target
    own = whole[..., split.offset : split.offset + split.length]
    with pytest.raises(UserCodeError) as raised:
        vocabulary_cross_entropy(own, targets, split=split, group=group)
    return str(raised.value)


@pytest.mark.parametrize("target", [11, -1])
def test_a_target_outside_of_the_vocabulary_is_refused_on_every_rank(ranks, target: int) -> None:
    for message in ranks(2, wrong_target, target):
        assert "must lie between 0 and 10" in message
        assert str(target) in message
