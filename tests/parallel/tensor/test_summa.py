"""The product in blocks is the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.mesh import build_mesh
from shoal.errors import LayoutError
from shoal.parallel.tensor.summa import Grid, SummaLinear
from shoal.topology.layout import Layout
from tests.parallel.tensor.split import F64, weighted
from tests.ranks import TestPlace

TOKENS, WIDTH, HIDDEN = 12, 24, 36


def grid_of(place: TestPlace, rows: int) -> Grid:
    """Ranks in row-major order."""
    columns = place.size // rows
    mesh = build_mesh(
        Layout(replicate=place.size), place.rank, store=place.store, device=torch.device("cpu"), timeout_s=20
    )  # fmt: skip
    row, column = divmod(place.rank, columns)
    return Grid(
        mesh.ranks(range(row * columns, (row + 1) * columns)), mesh.ranks(range(column, place.size, columns))
    )  # fmt: skip


def layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(HIDDEN, WIDTH, bias=False).double()


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, 2, WIDTH, generator=generator, dtype=torch.float64)


def in_blocks(place: TestPlace, rows: int) -> dict[str, tuple[tuple[slice, ...], Tensor]]:
    """Two layers, one behind the other; each result with the block of the whole that it is."""
    grid = grid_of(place, rows)
    first, second = (SummaLinear(layer, grid) for layer in layers())
    own = block(grid, TOKENS, WIDTH)
    x = tokens()[own].clone().requires_grad_()
    y = second(torch.tanh(first(x)))
    scale = torch.linspace(0.5, 1.5, TOKENS * 2 * WIDTH, dtype=torch.float64).view(TOKENS, 2, WIDTH)
    (y * scale[own]).sum().backward()
    return {
        "y": (own, y.detach().clone()),
        "x": (own, x.grad.clone()),
        "first": (first.box.slices, first.weight.grad.clone()),
        "bias": (first.box.slices[:1], first.bias.grad.clone()),
        "second": (second.box.slices, second.weight.grad.clone()),
    }


def block(grid: Grid, first: int, last: int) -> tuple[slice, ...]:
    """This rank's block of the tokens `[first, 2, last]`."""
    height, width = first // grid.column.size, last // grid.row.size
    i, j = grid.column.rank, grid.row.rank
    return slice(i * height, (i + 1) * height), slice(None), slice(j * width, (j + 1) * width)


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 1), (2, 2), (1, 4), (2, 3), (1, 1)])
def test_blocks_of_output_and_gradients_are_those_of_the_whole(ranks, rows: int, columns: int) -> None:
    """Output, and the gradients of input, weights and bias, for square grids and others."""
    x, (first, second) = tokens().requires_grad_(), layers()
    y = second(torch.tanh(first(x)))
    weighted(y).backward()
    whole = {
        "y": y.detach(), "x": x.grad, "first": first.weight.grad, "bias": first.bias.grad, "second": second.weight.grad
    }  # fmt: skip
    covered = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for results in ranks(rows * columns, in_blocks, rows):
        for name, (where, result) in results.items():
            torch.testing.assert_close(result, whole[name][where], **F64, msg=lambda text, n=name: f"{n}: {text}")
            covered[name][where] += 1
    for name, times in covered.items():
        assert times.min() == times.max() == (rows if name == "bias" else 1), name


def refusal(place: TestPlace) -> str:
    with pytest.raises(LayoutError) as raised:
        SummaLinear(nn.Linear(9, 8), grid_of(place, 1))
    return str(raised.value)


def test_inputs_that_do_not_divide_are_refused_with_the_nearest_that_do(ranks) -> None:
    assert "9 input features into 2 panels" in ranks(2, refusal)[0]
    assert "nearest: 8 or 10 features" in ranks(2, refusal)[0]
