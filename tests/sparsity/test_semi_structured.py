"""Products with two of every four weights, beside dense ones: by an oracle in plain operators, and on a GPU."""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.sparsity.masks import Masks, packed
from shoal.sparsity.patterns import of_every, of_every_tile
from shoal.sparsity.semi_structured import Product, SemiStructured, check_device, of_device
from tests.assembly.journey import whole_state
from tests.ranks import TestPlace
from tests.sync.steps import ADAM, opened
from tests.verification.layouts import corpus

OF_16_BITS = 2e-2
"""A product in bfloat16 beside one in another order, relative."""


def by_index(weight: Tensor) -> Product:
    """The product by the two numbers of every four that are kept, and their places."""
    fours = weight.unflatten(1, (-1, 4))
    places = fours.ne(0).to(torch.uint8).sort(dim=2, descending=True, stable=True).indices[..., :2]
    values = fours.gather(2, places)
    return lambda x: F.linear(x, torch.zeros_like(fours).scatter(2, places, values).flatten(1))


def masked_layer(*, both: bool, bias: bool = True, device: str = "cpu") -> tuple[nn.Linear, Tensor, Masks]:
    """A layer, its weight masked; the mask, and it as bits."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 32, bias=bias).to(device)
    scores = layer.weight.detach().abs()
    mask = of_every_tile(scores, 2) if both else of_every(scores, 2, 4)
    layer.weight.data.mul_(mask)
    return layer, mask, Masks({"weight": packed(mask)}, version=1)


def gradients(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    """The output and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    found = layer(x)
    weights = torch.linspace(-1, 1, found.numel(), device=x.device, dtype=found.dtype).view(found.shape)
    (found * weights).sum().backward()
    given = [found.detach(), x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    return [each for each in given if each is not None]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (64,)])
def test_products_and_gradients_are_those_of_the_dense_layer(both: bool, shape: tuple[int, ...]) -> None:
    layer, _, masks = masked_layer(both=both)
    x = torch.randn(shape)
    wanted = gradients(layer, x)
    SemiStructured({"weight": layer}, by_index, both=both).refresh(masks)
    for one, other in zip(gradients(layer, x), wanted, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_mask_of_rows_alone_is_no_mask_of_columns() -> None:
    """So the gradient of the input is computed densely then: the oracle would leave out what it needs."""
    layer, _, masks = masked_layer(both=False)
    x = torch.randn(5, 64)
    wanted = gradients(layer, x)
    SemiStructured({"weight": layer}, by_index, both=True).refresh(masks)
    assert not torch.allclose(gradients(layer, x)[1], wanted[1], rtol=1e-2)


def test_weights_are_compressed_once_until_they_change() -> None:
    """In training alone, and only where two of every four are kept."""
    layer, mask, masks = masked_layer(both=True)
    calls = []

    def counted(weight: Tensor) -> Product:
        calls.append(weight)
        return by_index(weight)

    products = SemiStructured({"weight": layer}, counted, both=True)
    layer(torch.zeros(1, 64))
    assert not calls, "there is no mask yet"
    products.refresh(masks)
    layer.eval()(torch.zeros(1, 64))
    assert not calls, "an evaluation"
    for _ in range(3):
        layer.train()(torch.zeros(1, 64))
    assert len(calls) == 2, "the weight, and turned"
    layer.weight.data.mul_(2)
    products.refresh(masks)
    assert torch.equal(layer(torch.ones(1, 64)), F.linear(torch.ones(1, 64), layer.weight, layer.bias))
    assert len(calls) == 4
    half = mask.clone()
    half[0, :4] = True
    products.refresh(Masks({"weight": packed(half)}, version=2))
    layer(torch.zeros(1, 64))
    assert len(calls) == 4, "four of one four are kept"


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_transposable_mask_is_the_best_of_all(kept: int) -> None:
    """Of each tile, by trying every one. It keeps of what was kept before alone."""
    scores = torch.rand(8, 12, generator=torch.Generator().manual_seed(kept))
    masks = [
        torch.tensor(bits).view(4, 4) for bits in itertools.product((0.0, 1.0), repeat=16) if sum(bits) == 4 * kept
    ]
    regular = torch.stack([m for m in masks if (m.sum(0) == kept).all() and (m.sum(1) == kept).all()])
    found = of_every_tile(scores, kept)
    for row, column in itertools.product(range(0, 8, 4), range(0, 12, 4)):
        tile, own = scores[row : row + 4, column : column + 4], found[row : row + 4, column : column + 4]
        assert torch.equal(own.float(), regular[(regular * tile).sum((1, 2)).argmax()])
    before = of_every_tile(scores, 3)
    after = of_every_tile(scores.masked_fill(~before, float("-inf")), kept)
    assert not (after & ~before).any()


def test_layers_and_devices_that_cannot_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"c\.weight is of Conv1d, not nn\.Linear"):
        SemiStructured({"c.weight": nn.Conv1d(4, 4, 1)}, by_index, both=False)
    with pytest.raises(ConfigError, match="weight is 32 x 36, and GPUs take multiples of 32 x 64"):
        SemiStructured({"weight": nn.Linear(36, 32)}, by_index, both=False)
    with pytest.raises(ConfigError, match="on a cpu device, which has no such products"):
        check_device(torch.device("cpu"))


OTHERS: list[dict[str, int]] = [{}, {"shard": 2}, {"pipeline": 2}]


def stepped(place: TestPlace, tables: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], list[int]]:
    """The state after ten steps, in which the oracle stands for the GPU; weights that were compressed in each."""
    calls = [0]

    def counted(weight: Tensor) -> Product:
        calls[0] += 1
        return by_index(weight)

    with patch("shoal.assembly.sparse.check_device"), patch("shoal.assembly.sparse.of_device", counted):
        run, counts = opened(place, tables, folder, Path(folder) / "unused"), []
    with closing(run.feed()) as feed:
        for _ in range(10):
            run.state.progress.advance((fed := feed.next()).interval)
            run.step(run.state.progress.step, fed.microbatches, lr=0.01)
            counts.append(calls[0])
            calls[0] = 0
    return whole_state(run), counts


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layout", [{"replicate": 2}, *(pytest.param(own, marks=pytest.mark.slow) for own in OTHERS)])
def test_a_run_learns_as_with_dense_products(ranks, tmp_path: Path, layout: dict[str, Any], both: bool) -> None:
    """Two of four from step 5 on, from when on each weight is compressed once a step, whatever the microbatches."""
    corpus(tmp_path)
    model = {"kind": "gpt", "vocabulary": 61, "layers": 1, "width": 64, "heads": 2, "feed_forward_width": 64}
    table = {"kind": "magnitude", "pattern": "2:4", "transposable": both, "schedule": {"begin": 4, "shape": "one_shot"}}
    tables = ADAM | {"model": model, "precision": {"kind": "bfloat16"}, "batch": {"micro_samples": 3}}
    tables |= {"layout": layout, "memory": {"zero": 2}} if "shard" in layout else {"layout": layout}
    world = math.prod(layout.values())
    dense, none = ranks(world, stepped, tables | {"sparsity": table}, str(tmp_path))[0]
    found, counts = ranks(
        world, stepped, tables | {"sparsity": table | {"products": "semi_structured"}}, str(tmp_path)
    )[0]
    assert none == [0] * 10
    assert counts == [0] * 4 + [7 * (2 if both else 1)] * 6
    assert found.keys() == dense.keys()
    for name, tensor in dense.items():
        assert (found[name].double() - tensor.double()).norm() <= OF_16_BITS * tensor.double().norm(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make gpu")
@pytest.mark.parametrize("both", [False, True])
def test_gpus_compute_with_two_of_every_four(both: bool) -> None:
    layer, _, masks = masked_layer(both=both, device="cuda")
    layer, x = layer.bfloat16(), torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
    check_device(x.device)
    wanted = gradients(layer, x)
    SemiStructured({"weight": layer}, of_device, both=both).refresh(masks)
    for one, other in zip(gradients(layer, x), wanted, strict=True):
        assert (one - other).norm() <= OF_16_BITS * other.norm()
