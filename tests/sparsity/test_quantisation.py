"""Weights that are rounded in the forward, trained as they are, and exported as integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from shoal.assembly.shrinking import as_integers
from shoal.checkpoint.weights import export, weights_of
from shoal.errors import ConfigError, UsageError
from shoal.models.adapters import integers, quantise, restored, rounded
from shoal.models.config import QuantisationConfig
from tests.assembly.training_ranks import trained as taken
from tests.sparsity.test_freezing import BASE, LAYOUTS, SUM_ORDER
from tests.sync.steps import SGD, gap, train
from tests.verification.layouts import corpus, run_file_of, verified

FOUR = QuantisationConfig(bits=4, group=4)


@pytest.mark.parametrize("config", [QuantisationConfig(), FOUR, QuantisationConfig(bits=4)])
def test_a_weight_is_the_nearest_of_its_grid(config: QuantisationConfig) -> None:
    """Group by group, by trying all integers."""
    weight = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight[2] = 0.0
    numbers, scales = integers(weight, config)
    size = config.group or 8
    for row in range(2):
        for place in range(8):
            group = weight[row, place // size * size :][:size]
            scale = group.abs().max() / config.largest
            grid = torch.arange(-config.largest, config.largest + 1) * scale
            assert restored(numbers, scales, dtype=torch.float64)[row, place] == pytest.approx(
                float(grid[(grid - weight[row, place]).abs().argmin()]), rel=1e-12
            )
    assert not restored(numbers, scales, dtype=torch.float64)[2].any()


def test_the_gradient_passes_the_rounding_by() -> None:
    weight = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 8, dtype=torch.float64)
    (F.linear(x, rounded(weight, FOUR)) ** 2).sum().backward()
    grid = restored(*integers(weight.detach(), FOUR), dtype=torch.float64).requires_grad_()
    (F.linear(x, grid) ** 2).sum().backward()
    assert torch.allclose(weight.grad, grid.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (QuantisationConfig(layers=("*.q_proj",)), 'quantisation.layers: "*.q_proj" matches no nn.Linear'),
        (QuantisationConfig(group=3), "quantisation.group = 3: the rows of 0 have 4 weights"),
    ],
)
def test_what_cannot_be_rounded_is_refused(config: QuantisationConfig, sentence: str) -> None:
    with pytest.raises(ConfigError) as found:
        quantise(nn.Sequential(nn.Linear(4, 2)), config)
    assert sentence in str(found.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rounded")
    corpus(folder)
    return folder


ROUNDED: dict[str, Any] = BASE | SGD | {"quantisation": {"bits": 4, "group": 8}}


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("layout", ["replicate", "ZeRO-1", "ZeRO-3", "pipeline"])
def test_every_layout_trains_as_one_process(ranks, folder: Path, layout: str) -> None:
    world, tables = LAYOUTS[layout]
    wanted = ranks(1, train, ROUNDED, str(folder), 0, 4)[0]
    found = ranks(world, train, ROUNDED | tables, str(folder), 0, 4)[0]
    assert gap(found.weights, wanted.weights) < SUM_ORDER
    assert gap(found.weights, ranks(1, train, BASE | SGD, str(folder), 0, 4)[0].weights) > 1e-4
    verdict, *_ = ranks(world, verified, ROUNDED | tables, str(folder), False, 2)
    assert verdict["holds"], verdict["sentence"]


def test_integers_are_exported_with_their_scales(ranks, tmp_path: Path) -> None:
    """They stand for what the forward computes with."""
    corpus(tmp_path)
    ranks(1, taken, ROUNDED, str(tmp_path), 2)
    run_file = run_file_of(tmp_path, **ROUNDED)
    export(tmp_path / "run", tmp_path / "integers.safetensors", change=lambda w: as_integers(w, run_file))
    found, weights = load_file(tmp_path / "integers.safetensors"), weights_of(tmp_path / "run")
    name = "blocks.1.feed_forward.up.weight"
    assert found[name].dtype == torch.int8
    assert found[name].abs().max() == 7
    grid = restored(found[name], found[f"{name}_scale"], dtype=torch.float64)
    assert torch.allclose(grid, rounded(weights[name], QuantisationConfig(bits=4, group=8)), rtol=1e-12)
    assert torch.equal(found["head.weight"], weights["head.weight"])
    with pytest.raises(UsageError, match="leave out --integers"):
        as_integers(weights, run_file_of(tmp_path))
