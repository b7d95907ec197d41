"""First values of models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.errors import UserCodeError
from shoal.models.build import BLOCK_NUMEL, build, draw, initialise, parameter_count
from shoal.models.config import BuiltInModel, ConvNetConfig, GPTConfig, MLPConfig
from shoal.models.roles import ONES, Normal, Role, roles_of

SMALL: list[BuiltInModel] = [
    GPTConfig(vocabulary=32, layers=2, width=16, heads=2),
    GPTConfig(vocabulary=32, layers=1, width=16, heads=2, tied=True, feed_forward="gelu"),
    ConvNetConfig(width=8),
    ConvNetConfig(width=8, norm="batch"),
    MLPConfig(inputs=6, hidden=(5, 4), outputs=3),
]


def made(config: BuiltInModel, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        model = build(config)
    initialise(model, seed=seed, device="cpu", dtype=dtype)
    return model


@pytest.mark.parametrize("config", SMALL)
def test_nothing_is_left_on_meta_and_nothing_is_left_to_chance(config: BuiltInModel) -> None:
    """Two builds of one seed are bitwise equal whatever the global generator's state; another seed differs."""
    torch.manual_seed(1)
    first = made(config).state_dict()
    torch.manual_seed(2)
    again, other = made(config).state_dict(), made(config, seed=1).state_dict()
    assert all(value.device.type == "cpu" for value in first.values())
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert any(not torch.equal(value, other[name]) for name, value in first.items())


@pytest.mark.parametrize("config", SMALL)
def test_any_half_of_any_parameter_drawn_alone_is_the_half_of_the_whole(config: BuiltInModel) -> None:
    """What a rank draws of a parameter, split along any dimension, is bitwise its slice in the unsplit model."""
    model = made(config, seed=5)
    roles = roles_of(model)
    for name, whole in model.named_parameters():
        law = roles[name].init
        assert law is not None
        for dim, size in enumerate(whole.shape):
            offsets, shape = [0] * whole.ndim, list(whole.shape)
            offsets[dim], shape[dim] = size // 2, size - size // 2
            half = draw(law, name, seed=5, global_shape=whole.shape, offsets=offsets, shape=shape)
            assert torch.equal(half, whole.narrow(dim, size // 2, size - size // 2)), name


@settings(max_examples=20)
@given(data=st.data())
def test_boxes_longer_than_a_block_are_seamless(data: st.DataObject) -> None:
    """Drawing block by block leaves no trace at the seams: boxes over several blocks equal the slice of the whole."""
    shape = (300, 700)
    assert shape[0] * shape[1] > 3 * BLOCK_NUMEL
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = [data.draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True)]
    whole = draw(Normal(1.0), "w", seed=0, global_shape=shape, offsets=(0, 0), shape=shape, dtype=torch.float64)
    box = draw(Normal(1.0), "w", seed=0, global_shape=shape, offsets=offsets, shape=lengths, dtype=torch.float64)
    assert torch.equal(box, whole[offsets[0] :, offsets[1] :][: lengths[0], : lengths[1]])


def test_parameters_follow_their_laws() -> None:
    """Embeddings have deviation 0.02, residual projections 0.02 / sqrt(2 layers), norms are 1, biases 0."""
    gpt = made(GPTConfig(vocabulary=512, layers=8))
    values = dict(gpt.named_parameters())
    assert values["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert values["blocks.3.attention.output.weight"].std().item() == pytest.approx(0.005, rel=0.03)
    assert bool((values["norm.weight"] == 1).all())
    assert not bool(dict(made(SMALL[4]).named_parameters())["layers.0.bias"].any())


def test_precision_is_a_rounding_of_the_same_draw() -> None:
    """A float32 model is the float64 model of the same seed, rounded."""
    wide, narrow = made(SMALL[0], dtype=torch.float64), made(SMALL[0], dtype=torch.float32)
    for (name, exact), rounded in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert exact.dtype == torch.float64
        assert torch.equal(exact.float(), rounded), name


def test_ties_survive_and_are_drawn_once() -> None:
    """A tied head has the embedding's storage and its draw, and counts once."""
    tied = made(SMALL[1])
    assert tied.head.weight is tied.embedding.weight  # type: ignore[union-attr]
    law = Normal(0.02)
    assert torch.equal(
        tied.head.weight,  # type: ignore[union-attr, arg-type]
        draw(law, "embedding.weight", seed=0, global_shape=(32, 16), offsets=(0, 0), shape=(32, 16)),
    )
    assert parameter_count(tied) == sum(value.numel() for value in dict(tied.named_parameters()).values())


def test_buffers_start_fresh_and_are_never_narrowed() -> None:
    """Running statistics are reset, follow a wider type, and stay float32 under a narrower one; sums stay float64."""
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        buffers = dict(made(SMALL[3], dtype=dtype).named_buffers())
        assert bool((buffers["layers.0.norm.running_var"] == 1).all())
        assert not bool(buffers["layers.0.norm.running_mean"].any())
        assert buffers["layers.0.norm.running_mean"].dtype == expected
        assert buffers["layers.0.norm.totals"].dtype == torch.float64


def test_frozen_parameters_stay_frozen() -> None:
    """`requires_grad = False` outlives the move from the meta device."""
    with torch.device("meta"):
        model = build(SMALL[4])
    next(model.parameters()).requires_grad_(False)
    initialise(model, seed=0, device="cpu")
    assert [parameter.requires_grad for parameter in model.parameters()][:2] == [False, True]


class Table(nn.Module):
    """A module with a buffer that it does not know how to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.arange(4.0))

    def parameter_roles(self) -> dict[str, Role]:
        return {"scale": Role("replicated", ONES, decay=False)}


def test_what_cannot_be_computed_is_refused() -> None:
    """A parameter without a law, or a meta buffer nobody resets, is named in an error; a real buffer is kept."""
    with pytest.raises(UserCodeError, match="'weight' of Linear has no declared first values"):
        initialise(nn.Linear(2, 2), seed=0, device="cpu")
    with torch.device("meta"):
        model = Table()
    with pytest.raises(UserCodeError, match=r"buffer '\.?table' has no value .* reset_buffers"):
        initialise(model, seed=0, device="cpu")
    kept = Table()
    initialise(kept, seed=0, device="cpu", dtype=torch.float64)
    assert torch.equal(kept.table, torch.arange(4.0, dtype=torch.float64))  # type: ignore[arg-type]
    assert kept.scale.item() == 1
