"""What is kept of a layer by its scores, beside plain loops over its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.assembly.masked_layers import masked_layers, said_of_masks
from shoal.errors import ConfigError
from shoal.parallel.split import Unsplit
from shoal.sparsity.config import Magnitude, Sparse
from shoal.sparsity.masks import Masks, packed, unpacked
from shoal.sparsity.patterns import check_divides, moved, of_every, spread, top, units, units_in
from shoal.topology.holding import whole
from tests.verification.layouts import run_file_of


def largest_first(scores: Tensor) -> list[int]:
    """The places of flat scores, largest first, of equal ones the first."""
    return sorted(range(scores.numel()), key=lambda place: (-float(scores[place]), place))


@pytest.mark.parametrize("count", [0, 1, 7, 12, 20])
def test_the_largest_are_kept_and_of_equal_ones_the_first(count: int) -> None:
    scores = torch.tensor([3, 1, 2, 3, 3, 0, 0, 2, 2, 1, 3, 2] * 2, dtype=torch.float32)[:20]
    kept = top(scores, count).nonzero().flatten().tolist()
    assert kept == sorted(largest_first(scores)[:count])


def test_n_of_every_m_are_the_largest_of_each_group() -> None:
    scores = torch.rand(6, 2, 8, generator=torch.Generator().manual_seed(0))
    mask = of_every(scores, 2, 4)
    for group, kept in zip(scores.view(-1, 4), mask.view(-1, 4), strict=True):
        assert kept.nonzero().flatten().tolist() == sorted(largest_first(group)[:2])


def units_of(shape: tuple[int, ...], config: Sparse) -> Iterator[Tensor]:
    """The units of a layer of two dimensions, each as a mask."""
    for row in range(0, shape[0], 1 if config.pattern == "rows" else config.block[0]):
        for column in range(0, shape[1], config.block[1]):
            mask = torch.zeros(shape, dtype=torch.bool)
            if config.pattern == "rows":
                mask[row] = True
            else:
                mask[row : row + config.block[0], column : column + config.block[1]] = True
            yield mask
            if config.pattern == "rows":
                break


@pytest.mark.parametrize(("pattern", "block"), [("rows", (4, 4)), ("block", (2, 3)), ("block", (8, 1))])
def test_a_unit_is_kept_by_the_mean_of_its_weights(pattern: str, block: tuple[int, int]) -> None:
    config = Magnitude(density=0.5, pattern=pattern, block=block)
    scores = torch.rand(8, 12, generator=torch.Generator().manual_seed(1))
    masks = list(units_of((8, 12), config))
    means = torch.stack([scores[mask].mean() for mask in masks])
    assert units_in((8, 12), config) == len(masks)
    assert torch.allclose(units(scores, config), means)
    kept = top(means, 3)
    wanted = torch.stack([mask for mask, own in zip(masks, kept, strict=True) if own]).any(0)
    assert torch.equal(spread(top(units(scores, config), 3), (8, 12), config), wanted)


def test_columns_of_a_convolution_are_its_input_channels() -> None:
    config = Magnitude(density=0.5, pattern="columns")
    scores = torch.rand(4, 6, 3, 3, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(units(scores, config), scores.mean((0, 2, 3)))
    mask = spread(torch.tensor([True, False] * 3), (4, 6, 3, 3), config)
    assert mask[:, 0].all()
    assert not mask[:, 1].any()


def test_what_moves_is_the_smallest_weight_and_the_largest_growth() -> None:
    """RigL's algorithm 1, by hand: of the kept 0, 1, 2 the smallest goes; what grows best comes, be it the same."""
    kept = torch.tensor([True, True, True, False, False])
    weight, growth = torch.tensor([3.0, 1.0, 2.0, 0.0, 0.0]), torch.tensor([9.0, 4.0, 9.0, 5.0, 3.0])
    assert moved(kept, weight, growth, 1).tolist() == [True, False, True, True, False]
    assert moved(kept, weight, torch.tensor([9.0, 6.0, 9.0, 5.0, 3.0]), 1).tolist() == kept.tolist()


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 64, 1001])
def test_bits_come_back(numel: int) -> None:
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < 0.3
    bits = packed(mask)
    assert bits.numel() == -(-numel // 8)
    assert torch.equal(unpacked(bits, (numel,)), mask)


def test_the_mask_of_boxes_lies_as_they_do() -> None:
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(3)) < 0.5
    masks = Masks({"w": packed(mask)})
    boxes = (whole((2, 4)), whole((3, 2))._replace(offset=(3, 1)))
    found = masks.held("w", (6, 4), boxes)
    assert found is not None
    assert torch.equal(found, torch.cat([mask[:2].flatten(), mask[3:6, 1:3].flatten()]))


class Vision(nn.Module):
    """Names and shapes as torchvision and timm have them."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token, self.pos_embed = (nn.Parameter(torch.zeros(1, count, 8)) for count in (1, 5))
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.encoder = nn.ModuleDict({"mlp": nn.Linear(8, 16), "depthwise": nn.Conv2d(8, 8, 3, groups=8)})
        self.words = nn.Embedding(4, 8)
        self.fc = nn.Linear(16, 10)


def test_embeddings_heads_and_what_a_pattern_does_not_divide_stay_dense(tmp_path: Path) -> None:
    def masked(**table: Any) -> set[str]:
        return set(masked_layers(run_file_of(tmp_path, sparsity={"kind": "magnitude"} | table), split))

    split = Unsplit.of(Vision())
    every = {"conv1.weight", "encoder.mlp.weight", "encoder.depthwise.weight"}
    assert masked(density=0.5) == every
    assert masked(pattern="2:4") == {"encoder.mlp.weight"}
    assert masked(pattern="2:4", layers=["*.weight"]) == {*every, "words.weight", "fc.weight"}, "what is named"
    said = said_of_masks(run_file_of(tmp_path, sparsity={"kind": "magnitude", "pattern": "2:4"}), split)
    assert said.startswith("masks on 128 weights of 1 layer; conv1.weight, encoder.depthwise.weight stay dense")
    with pytest.raises(ConfigError, match=r"no trained weight of a name like \*\.attention\.\* or \*\.self_attn"):
        masked(density=0.5, pattern="heads")
    with pytest.raises(ConfigError, match="is no multiple of 5"):
        masked(pattern="1:5")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Magnitude(pattern="2:4"), "no multiple of 4; leave it out of sparsity.layers"),
        (Magnitude(density=0.1, pattern="block", block=(4, 2)), r"has 6 rows of 10 weights"),
    ],
)
def test_a_pattern_that_does_not_divide_is_refused(config: Sparse, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_divides("head.weight", (6, 10), config)
