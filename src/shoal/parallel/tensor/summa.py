"""A matrix product whose three matrices lie in blocks on a grid of ranks: SUMMA (van de Geijn and Watts, 1997).

    Y = X W^T        X [m, k], W [n, k] (as in nn.Linear), Y [m, n];  rank (i, j) of a grid of R x C holds

    X[m_i, k_j]      rows split over the R rows of the grid, columns over its C columns
    W[n_j, k_i]      the outputs split over the columns of the grid, the inputs over its rows
    Y[m_i, n_j]      so the next layer takes it as its X

k is walked through in lcm(R, C) panels. For each, the ranks that have the panel of X send it along their row of the
grid, those that have that of W along their column, and every rank adds a product to its block of Y. Backward,

    dX[., panel] = sum over the row of the grid of dY W[., panel]
    dW[., panel] = sum over the column of dY^T X[., panel]

are formed in the same walk and summed to the rank that has the panel. Nobody ever holds a whole matrix, and a rank
receives (m k / R) (C - 1) / C + (n k / C) (R - 1) / R numbers in the forward, against m n for a split along one axis
that ends in an all-reduce: less where all three sides are large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective, Handle
from shoal.errors import LayoutError
from shoal.parallel.tensor.layers import Cut
from shoal.topology.refusal import nearest_divisors, nearest_multiples


@dataclass(frozen=True)
class Grid:
    """A rank's place in a grid: the ranks of its row, in which it is number j, and of its column, number i."""

    row: Collective
    column: Collective

    @property
    def panels(self) -> int:
        """How many panels the inner dimension has, so that each lies on one rank of every row and column."""
        return lcm(self.row.size, self.column.size)

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return self.row.size * self.column.size

    @property
    def place(self) -> int:
        """This rank's number along the rows, one after the other."""
        return self.column.rank * self.row.size + self.row.rank


def lines_of(ranks: Sequence[int], place: int, *, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The row and the column of a place in a grid of `rows` rows in which `ranks` stand one row after the other.

    Raises `LayoutError` where the rows do not come out even.
    """
    if len(ranks) % rows:
        nearest = " or ".join(map(str, nearest_divisors(len(ranks), rows)))
        raise LayoutError(f"{len(ranks)} ranks do not make {rows} rows of a grid; nearest: {nearest} rows")
    columns = len(ranks) // rows
    i, j = divmod(place, columns)
    return tuple(ranks[i * columns : (i + 1) * columns]), tuple(ranks[j::columns])


def summa_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, grid: Grid) -> Tensor:
    """Blocks `x` `[..., k / C]` and `weight` `[n_j, k / R]` to this rank's block `[..., n_j]` of the product.

    `bias` `[n_j]` is the same on all ranks of a column of the grid, and each has a term of its gradient. Sums are in
    float32 at least. All ranks of a row of the grid have `x` of one shape. Under autocast the product is in its dtype,
    as that of `nn.Linear`.
    """
    rows = _Summa.apply(_autocast(x).flatten(0, -2), _autocast(weight), grid)
    y = rows.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


def _autocast(x: Tensor) -> Tensor:
    """`x` in the dtype of autocast, which does not reach into a function with its own backward; float64 is exempt."""
    device = x.device.type
    exempt = x.dtype == torch.float64 or not torch.is_autocast_enabled(device)
    return x if exempt else x.to(torch.get_autocast_dtype(device))


def unturned(x: Tensor) -> Tensor:
    """Blocks as they are."""
    return x


class SummaLinear(nn.Module):
    """This rank's block of a linear layer. `before` and `after` make blocks of its input, and what follows of its
    output."""

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        grid: Grid,
        before: Callable[[Tensor], Tensor] = unturned,
        after: Callable[[Tensor], Tensor] = unturned,
    ) -> None:
        super().__init__()
        self.weight, self.grid, self.before, self.after = weight, grid, before, after
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(summa_linear(self.before(x), self.weight, self.bias, grid=self.grid))


def block_cuts(outputs: int, inputs: int, grid: Grid, *, what: str) -> dict[int, Cut]:
    """This rank's block of a weight `[outputs, inputs]`, by dim; `what` names the layer.

    Raises `LayoutError` unless both sides can be cut into the grid's panels, so that layers fit behind each other.
    """
    for features in (outputs, inputs):
        if features % grid.panels:
            nearest = " or ".join(map(str, nearest_multiples(grid.panels, features)))
            raise LayoutError(
                f"{what} has a side of {features} features, which a grid of {grid.column.size} x {grid.row.size} ranks "
                f"cuts into {grid.panels} panels; nearest: {nearest} features"
            )
    i, j = grid.column.rank, grid.row.rank
    height, width = outputs // grid.row.size, inputs // grid.column.size
    here = (grid.place,)
    return {0: Cut(j * height, height, here), 1: Cut(i * width, width, here)}


def bias_cuts(outputs: int, grid: Grid) -> dict[int, Cut]:
    """This rank's part of a bias, which is that of all the ranks of its column."""
    height, columns = outputs // grid.row.size, grid.row.size
    column = tuple(range(grid.row.rank, columns * grid.column.size, columns))
    return {0: Cut(grid.row.rank * height, height, column)}


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        y = x.new_zeros(x.shape[0], weight.shape[0], dtype=_sum_type(x))
        for panel in _walk(x, weight, grid):
            y += panel.x @ panel.weight.T
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        dy, grid = grads[0], ctx.grid
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        for panel in _walk(x, weight, grid):
            _sum_to(grid.row, panel.column_of_x, dy @ panel.weight, dx[:, panel.within_x])
            _sum_to(grid.column, panel.row_of_weight, dy.T @ panel.x, dweight[:, panel.within_weight])
        return dx, dweight, None


@dataclass(frozen=True)
class _Panel:
    """One panel, here: the numbers, and which column and row of the grid they come from, and from where in them."""

    x: Tensor
    weight: Tensor
    column_of_x: int
    row_of_weight: int
    within_x: slice
    within_weight: slice
    handles: tuple[Handle, ...]


def _walk(x: Tensor, weight: Tensor, grid: Grid) -> Iterator[_Panel]:
    """The panels in order; while one is worked on, the next is under way."""
    coming = _start(x, weight, grid, number=0)
    for number in range(1, grid.panels + 1):
        panel = coming
        if number < grid.panels:
            coming = _start(x, weight, grid, number=number)
        for handle in panel.handles:
            handle.wait()
        yield panel


def _start(x: Tensor, weight: Tensor, grid: Grid, *, number: int) -> _Panel:
    column, within_x = _owner(number, grid.panels, grid.row.size, x.shape[1])
    row, within_weight = _owner(number, grid.panels, grid.column.size, weight.shape[1])
    panel_x = _own_or_empty(x, within_x, grid.row.rank == column)
    panel_weight = _own_or_empty(weight, within_weight, grid.column.rank == row)
    handles = grid.row.broadcast(panel_x, root=column), grid.column.broadcast(panel_weight, root=row)
    return _Panel(panel_x, panel_weight, column, row, within_x, within_weight, handles)


def _owner(number: int, panels: int, ranks: int, features: int) -> tuple[int, slice]:
    """Which of `ranks` ranks, of `features` features each, has a panel, and where among its features."""
    each = panels // ranks
    width = features // each
    return number // each, slice(number % each * width, (number % each + 1) * width)


def _own_or_empty(block: Tensor, within: slice, own: bool) -> Tensor:
    panel = block[:, within]
    # A copy even where the panel is the whole block: a broadcast may write to its root's tensor, too.
    return panel.clone(memory_format=torch.contiguous_format) if own else panel.new_empty(panel.shape)


def _sum_to(group: Collective, root: int, term: Tensor, target: Tensor) -> None:
    """`target` of the rank `root` becomes the sum of the terms."""
    total = term.to(_sum_type(term)).contiguous()
    group.reduce(total, root=root).wait()
    if group.rank == root:
        target.copy_(total)


def _sum_type(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
