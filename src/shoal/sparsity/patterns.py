"""What is kept together, and which of it: pure functions of the scores of one whole layer.

A layer's scores have its shape. A **unit** is what is kept or masked as one: a weight, a row, a block. The score of a
unit is the mean of its weights' scores, so that units of different layers can be compared. Of equal scores the one that
comes first in the layer is kept.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.sparsity.config import Sparse
from shoal.topology.holding import Dims

MASKED = -math.inf
"""The score of what may not come back."""


def top(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of flat `scores`, as a mask of their shape."""
    if count >= scores.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.topk(count, sorted=True).values[-1]
    kept = scores > threshold
    ties = (scores == threshold).nonzero().flatten()
    kept[ties[: count - int(kept.sum())]] = True
    return kept


def units(scores: Tensor, config: Sparse) -> Tensor:
    """The scores of the units of a layer, flat; those of single weights for "unstructured" and "N:M"."""
    match config.pattern:
        case "rows":
            return scores.flatten(1).mean(1)
        case "columns":
            return scores.transpose(0, 1).flatten(1).mean(1)
        case "block":
            rows, columns = config.block
            return _blocks(scores.flatten(1), rows, columns).mean((1, 3)).flatten()
    return scores.flatten()


def spread(kept: Tensor, shape: Dims, config: Sparse) -> Tensor:
    """The mask of a layer of `shape` from that of its units."""
    match config.pattern:
        case "rows":
            return kept.view(-1, *(1,) * (len(shape) - 1)).expand(shape)
        case "columns":
            return kept.view(1, -1, *(1,) * (len(shape) - 2)).expand(shape)
        case "block":
            rows, columns = config.block
            height, width = shape[0], math.prod(shape[1:])
            grid = kept.view(height // rows, 1, width // columns, 1)
            return grid.expand(-1, rows, -1, columns).reshape(shape)
    return kept.view(shape)


def of_every(scores: Tensor, kept: int, of: int) -> Tensor:
    """The mask that keeps the `kept` largest of every `of` neighbours of a row of `scores`."""
    groups = scores.reshape(-1, of)
    order = groups.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True).view(scores.shape)


def of_every_tile(scores: Tensor, kept: int) -> Tensor:
    """The mask that keeps `kept` of each row and of each column of every tile of 4 x 4, and of all such masks the one
    of the largest sum of `scores` `[rows, columns]` in each tile (transposable masks, arXiv:2102.08124).
    """
    masks = _regular_tiles(kept).to(scores.device)
    tiles = _blocks(scores.clamp(min=LEAST_SCORE), 4, 4).transpose(1, 2)
    chosen = masks[(tiles.flatten(2) @ masks.to(scores.dtype).T).argmax(2)]
    return chosen.unflatten(2, (4, 4)).transpose(1, 2).reshape(scores.shape)


LEAST_SCORE = -1e30
"""In the place of what may not come back, so that sums are numbers."""


def _regular_tiles(kept: int) -> Tensor:
    """All masks of 4 x 4 with `kept` in each row and column, bool `[masks, 16]`."""
    rows = [row for row in itertools.product((False, True), repeat=4) if sum(row) == kept]
    tiles = torch.tensor(list(itertools.product(rows, repeat=4)))
    return tiles[(tiles.sum(1) == kept).all(1)].flatten(1)


def units_in(shape: Dims, config: Sparse) -> int:
    """How many units a layer of `shape` has."""
    match config.pattern:
        case "rows":
            return shape[0]
        case "columns":
            return shape[1]
        case "block":
            return math.prod(shape) // math.prod(config.block)
    return math.prod(shape)


def check_divides(name: str, shape: Dims, config: Sparse) -> None:
    """Raises `ConfigError` where the pattern does not divide the layer `name`, of `shape` as rows."""
    refused = undivided(name, shape, config)
    if refused is not None:
        raise ConfigError(refused)


def undivided(name: str, shape: Dims, config: Sparse) -> str | None:
    """Why the pattern does not divide the layer `name`, of `shape` as rows, and what to do; None where it does."""
    height, width, kept = shape[0], math.prod(shape[1:]), config.kept_of
    if kept is not None and width % kept[1]:
        return (
            f'sparsity.pattern = "{config.pattern}": the rows of {name} have {width} weights, which is no multiple of '
            f"{kept[1]}; leave it out of sparsity.layers, or use another pattern"
        )
    if config.transposable and (len(shape) != 2 or height % 4):
        return (
            f"sparsity.transposable: {name} is {' x '.join(map(str, shape))}, which tiles of 4 x 4 do not divide; "
            "leave it out of sparsity.layers, or leave transposable out"
        )
    if config.pattern in ("rows", "columns") and units_in(shape, config) == 1:
        return (
            f'sparsity.pattern = "{config.pattern}": {name} has one, which is all of it; leave it out of '
            "sparsity.layers, or use another pattern"
        )
    rows, columns = config.block
    if config.pattern == "block" and (height % rows or width % columns):
        return (
            f"sparsity.block = {list(config.block)}: {name} has {height} rows of {width} weights, which such blocks do "
            "not divide; leave it out of sparsity.layers, or use other blocks"
        )
    return None


def moved(kept: Tensor, weight: Tensor, growth: Tensor, count: int) -> Tensor:
    """A mask of as many units: of those `kept`, `count` of the smallest `weight` go, and what has the largest `growth`
    of all that do not stay comes (RigL, algorithm 1). All are flat.
    """
    number = int(kept.sum())
    stay = top(weight.masked_fill(~kept, MASKED), number - count)
    return stay | top(growth.masked_fill(stay, MASKED), count)


def _blocks(matrix: Tensor, rows: int, columns: int) -> Tensor:
    height, width = matrix.shape
    return matrix.reshape(height // rows, rows, width // columns, columns)
