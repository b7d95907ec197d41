"""The product in blocks is the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import LayoutError
from shoal.parallel.tensor.summa import Grid, SummaLinear, block_cuts, lines_of
from tests.comm.local import local_group
from tests.parallel.tensor.split import F64, grid_of, tensor_mesh, weighted
from tests.ranks import TestPlace

TOKENS, WIDTH, HIDDEN = 12, 24, 36


def part_of(layer: nn.Linear, grid: Grid) -> tuple[SummaLinear, tuple[slice, ...]]:
    """This rank's block of a layer, and where in the weight it is."""
    cuts = block_cuts(layer.out_features, layer.in_features, grid, what="layer").values()
    where = tuple(slice(cut.offset, cut.offset + cut.length) for cut in cuts)
    bias = None if layer.bias is None else nn.Parameter(layer.bias[where[0]].detach().clone())
    return SummaLinear(nn.Parameter(layer.weight[where].detach().clone()), bias, grid=grid), where


def layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(HIDDEN, WIDTH, bias=False).double()


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, 2, WIDTH, generator=generator, dtype=torch.float64)


def in_blocks(place: TestPlace, rows: int) -> dict[str, tuple[tuple[slice, ...], Tensor]]:
    """Two layers, one behind the other; each result with the block of the whole that it is."""
    grid = grid_of(tensor_mesh(place), rows)
    (first, first_box), (second, second_box) = (part_of(layer, grid) for layer in layers())
    own = block(grid, TOKENS, WIDTH)
    x = tokens()[own].clone().requires_grad_()
    y = second(torch.tanh(first(x)))
    scale = torch.linspace(0.5, 1.5, TOKENS * 2 * WIDTH, dtype=torch.float64).view(TOKENS, 2, WIDTH)
    (y * scale[own]).sum().backward()
    return {
        "y": (own, y.detach().clone()),
        "x": (own, x.grad.clone()),
        "first": (first_box, first.weight.grad.clone()),
        "bias": (first_box[:1], first.bias.grad.clone()),
        "second": (second_box, second.weight.grad.clone()),
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
    total, times = ({name: torch.zeros_like(tensor) for name, tensor in whole.items()} for _ in range(2))
    for results in ranks(rows * columns, in_blocks, rows):
        for name, (where, result) in results.items():
            total[name][where] += result
            times[name][where] += 1
    for name, expected in whole.items():
        torch.testing.assert_close(total[name], expected, **F64, msg=lambda text, n=name: f"{n}: {text}")
        assert times[name].min() == times[name].max() == (rows if name == "bias" else 1), name


def bfloat16_product(place: TestPlace) -> torch.Tensor:
    grid = grid_of(tensor_mesh(place), 2)
    own = block(grid, TOKENS, WIDTH)
    first, _ = part_of(layers()[0].bfloat16(), grid)
    return first(tokens()[own].bfloat16()).detach().clone()


# One rounding to 8 bits of a sum of products, itself of rounded numbers of order 1.
BF16 = {"rtol": 2**-6, "atol": 2**-6}


def test_half_precision_is_summed_in_float32(ranks) -> None:
    """So the number of panels does not tell in the result, but for the one rounding at its end."""
    expected = layers()[0].bfloat16().float()(tokens().bfloat16().float())
    for rank, result in enumerate(ranks(4, bfloat16_product)):
        i, j = divmod(rank, 2)
        assert result.dtype == torch.bfloat16
        block_of = expected[i * TOKENS // 2 : (i + 1) * TOKENS // 2, :, j * HIDDEN // 2 : (j + 1) * HIDDEN // 2]
        torch.testing.assert_close(result.float(), block_of.detach(), **BF16)


def autocast_product(place: TestPlace, dtype: torch.dtype) -> dict[str, tuple[tuple[slice, ...], Tensor]]:
    grid = grid_of(tensor_mesh(place), 2)
    own, (layer, box) = block(grid, TOKENS, WIDTH), part_of(layers()[0].float(), grid)
    x = tokens()[own].float().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    y.square().sum().backward()
    gradients = {"x": (own, x.grad), "weight": (box, layer.weight.grad), "bias": (box[:1], layer.bias.grad)}
    assert all(gradient.dtype == torch.float32 for _, gradient in gradients.values())
    return {"y": (block(grid, TOKENS, HIDDEN), y.detach().clone()), **gradients}


# Of the largest number: a few roundings to 8 bits, those of the output, of its gradient and of each rank's term.
OF_LARGEST = 2**-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_it_is_the_linear_layer_under_autocast(ranks, dtype: torch.dtype) -> None:
    """The product in half precision, from weights and to gradients in float32."""
    x, layer = tokens().float().requires_grad_(), layers()[0].float()
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    y.square().sum().backward()
    whole = {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    total = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    for results in ranks(4, autocast_product, dtype):
        for name, (where, result) in results.items():
            total[name][where] += result.float()
    for name, expected in whole.items():
        assert (total[name] - expected).abs().max() <= OF_LARGEST * expected.abs().max(), name


def test_sides_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    row, column = (local_group(2)[0] for _ in range(2))
    with pytest.raises(LayoutError, match=r"up has a side of 9 features, .* 2 x 2 .* nearest: 8 or 10 features"):
        block_cuts(8, 9, Grid(row, column), what="up")
    with pytest.raises(LayoutError, match=r"6 ranks do not make 4 rows of a grid; nearest: 3 or 6 rows"):
        lines_of(range(6), 0, rows=4)
