"""Gradient transforms on whole parameters, beside their equations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Alone
from shoal.errors import ConfigError
from shoal.optim.declared import AddNoise, Centralise, ClipAdaptively, ClipLayer, ClipValue, TransformConfig
from shoal.optim.parts import Parts
from shoal.optim.transforms import Chain
from shoal.runfile.load import load_run
from shoal.state import Trained, owned_whole
from shoal.topology.holding import held
from shoal.topology.layout import Layout

RECIPES = Path(__file__).parents[2] / "recipes"
SHAPES = {"matrix": (5, 7), "kernel": (3, 2, 4), "bias": (9,), "gate": ()}


def changed(*transforms: TransformConfig, step: int = 1, seed: int = 0) -> tuple[dict[str, Tensor], ...]:
    """Parameters, gradients before, gradients after."""
    generator = torch.Generator().manual_seed(3)
    held_by_name, before = {}, {}
    for name, shape in SHAPES.items():
        held_by_name[name] = Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        before[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        held_by_name[name].grad = before[name].clone()
    owned = [owned_whole(Trained(held(Layout(), 0, n, SHAPES[n]), p)) for n, p in held_by_name.items()]
    Chain(transforms, Parts(owned, Alone(), Alone()), seed)(step)
    after = {name: p.grad for name, p in held_by_name.items() if p.grad is not None}
    return {name: p.detach() for name, p in held_by_name.items()}, before, after


def rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)


def test_numbers_are_clipped() -> None:
    """None is larger than the limit, and smaller ones are as they were."""
    _, before, after = changed(ClipValue(limit=0.5))
    for name, gradient in before.items():
        assert torch.equal(after[name], gradient.clamp(-0.5, 0.5))


def test_layers_are_clipped() -> None:
    """Each to its own norm."""
    _, before, after = changed(ClipLayer(limit=2.0))
    for name, gradient in before.items():
        wanted = gradient * min(1.0, 2.0 / float(gradient.norm()))
        assert torch.allclose(after[name], wanted, rtol=1e-14)


def test_rows_are_clipped_by_their_weights() -> None:
    """min(1, limit max(|x|, least) / |g|) of each row."""
    held_by_name, before, after = changed(ClipAdaptively(limit=0.3, least=2.5))
    for name, gradient in before.items():
        most = 0.3 * rows(held_by_name[name]).norm(dim=1).clamp(min=2.5)
        factors = (most / rows(gradient).norm(dim=1)).clamp(max=1)
        assert torch.allclose(rows(after[name]), rows(gradient) * factors[:, None], rtol=1e-14)
    assert any(not torch.equal(after[name], gradient) for name, gradient in before.items())


def test_rows_of_matrices_are_centralised() -> None:
    """Their means become zero; vectors stay."""
    _, before, after = changed(Centralise())
    for name, gradient in before.items():
        wanted = rows(gradient) - rows(gradient).mean(1, keepdim=True) if gradient.ndim > 1 else rows(gradient)
        assert torch.allclose(rows(after[name]), wanted, atol=1e-15)


def test_noise_follows_from_seed_and_step() -> None:
    """The same twice, another one in another step or of another seed, and smaller later."""
    first, again, later, other = (
        changed(AddNoise(std=0.1, decay=2.0), step=step, seed=seed) for step, seed in ((1, 0), (1, 0), (10, 0), (1, 1))
    )
    noise = [torch.cat([(after[n] - before[n]).flatten() for n in SHAPES]) for _, before, after in (first, later)]
    assert all(torch.equal(first[2][name], again[2][name]) for name in SHAPES)
    assert not torch.equal(first[2]["matrix"], other[2]["matrix"])
    assert 0.07 < float(noise[0].std()) < 0.13
    assert 0.007 < float(noise[1].std()) < 0.013


def test_transforms_stand_in_a_chain() -> None:
    """Each sees what the one before it left."""
    _, before, after = changed(ClipValue(limit=0.5), Centralise())
    _, _, other = changed(Centralise(), ClipValue(limit=0.5))
    clipped = rows(before["matrix"]).clamp(-0.5, 0.5)
    assert torch.allclose(after["matrix"], clipped - clipped.mean(1, keepdim=True), atol=1e-15)
    assert not torch.allclose(after["matrix"], other["matrix"])


@pytest.mark.parametrize(
    "keys",
    [
        ('gradients.schedule="priority"', "layout.replicate=2", "optimizer.clip_norm=inf"),
        ('optimizer.kind="one_bit_adam"', "layout.replicate=2"),
        ('sync.kind="server"', "layout.replicate=2", "run.processes=2"),
    ],
)
def test_they_are_refused_where_there_is_no_agreed_gradient(keys) -> None:
    """With a sentence that says which keys, and what to do."""
    with pytest.raises(ConfigError, match=r"optimizer\.transforms \(centralise\) with .*; leave one of the two out$"):
        load_run(RECIPES / "stdlib-gpt.toml", (*keys, 'optimizer.transforms=[{kind="centralise"}]'))
