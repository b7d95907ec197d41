"""Dropout with masks that belong to samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.models.layers import KeyedDropout, set_sample_keys


def dropped(x: torch.Tensor, keys: torch.Tensor, *, p: float = 0.3, name: str = "a", **options: object) -> torch.Tensor:
    layer = KeyedDropout(p, name)
    set_sample_keys(layer.modules(), keys)
    return layer(x, **options)


@settings(max_examples=25)
@given(cut=st.integers(1, 7), order=st.permutations(range(8)))
def test_masks_follow_the_samples_through_any_split_and_order(cut: int, order: list[int]) -> None:
    """A batch that is cut anywhere and shuffled drops, in each sample, exactly what it drops whole."""
    x, keys = torch.ones(8, 5, 3), torch.arange(100, 108)
    whole, shuffled = dropped(x, keys), keys[order]
    parts = torch.cat((dropped(x[:cut], shuffled[:cut]), dropped(x[cut:], shuffled[cut:])))
    assert torch.equal(parts, whole[order])


def test_a_part_of_the_positions_drops_what_the_whole_sample_drops() -> None:
    """A rank that holds some positions of each sample, in any order, finds its part of the whole mask."""
    x, keys = torch.ones(2, 6, 4), torch.tensor([3, 9])
    held = torch.tensor([[5, 0, 2], [1, 2, 3]])
    whole = dropped(x, keys)
    expected = torch.stack([whole[sample, held[sample]] for sample in range(2)])
    assert torch.equal(dropped(x[:, :3], keys, positions=held), expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_is_right_and_the_rest_is_scaled(p: float) -> None:
    """A share p is zero within five standard deviations of as many coin tosses, the rest is 1 / (1 - p)."""
    y = dropped(torch.ones(50, 2000), torch.arange(50), p=p)
    assert abs((y == 0).double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / y.numel())
    torch.testing.assert_close(y.unique(), torch.tensor([0, 1 / (1 - p)]))


def test_samples_and_layers_are_unrelated() -> None:
    """Neighbouring samples, and two layers of one sample, agree on half of a fair mask, as unrelated ones do."""
    keys = torch.arange(20)
    one, two = (dropped(torch.ones(20, 5000), keys, p=0.5, name=name) > 0 for name in "ab")
    tolerance = 5 * 0.5 / math.sqrt(one.numel())
    assert abs((one == two).double().mean().item() - 0.5) < tolerance
    assert abs((one[1:] == one[:-1]).double().mean().item() - 0.5) < tolerance


def test_a_recomputed_layer_drops_the_same() -> None:
    """Activation checkpointing gives the gradient that keeping the activations gives, bit by bit."""
    layer = nn.Sequential(nn.Linear(6, 6), KeyedDropout(0.5, "a"), nn.Tanh())
    set_sample_keys(layer.modules(), torch.arange(4))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (kept,) = torch.autograd.grad(layer(x).sum(), x)
    recomputed = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(recomputed, torch.Tensor)
    assert torch.equal(torch.autograd.grad(recomputed.sum(), x)[0], kept)


def test_it_is_the_identity_outside_training_and_at_zero() -> None:
    """eval() and p = 0 return the input itself and need no keys."""
    x = torch.ones(2, 3)
    assert KeyedDropout(0.0, "a")(x) is x
    assert KeyedDropout(0.5, "a").eval()(x) is x


def test_missing_or_foreign_keys_are_refused() -> None:
    """Training without keys, or with those of another batch, is an error that names the layer."""
    layer = KeyedDropout(0.5, "blocks.0")
    with pytest.raises(RuntimeError, match=r"'blocks\.0' found no sample keys for a batch of 2"):
        layer(torch.ones(2, 3))
    set_sample_keys(layer.modules(), torch.arange(3))
    with pytest.raises(RuntimeError, match=r"found sample keys of shape \[3\] for a batch of 2"):
        layer(torch.ones(2, 3))
    set_sample_keys(layer.modules(), None)
    with pytest.raises(RuntimeError, match="call set_sample_keys"):
        layer(torch.ones(3, 3))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_a_share_that_is_none_is_refused(p: float) -> None:
    """p lies in [0, 1)."""
    with pytest.raises(ValueError, match=f"dropout p = {p}"):
        KeyedDropout(p, "a")
