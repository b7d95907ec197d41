"""The layers of a region in blocks on a grid: feed-forwards as they are, attention with an exchange of heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from shoal.errors import LayoutError
from shoal.parallel.tensor.blocks import enter_heads, leave_heads
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.split_layer import SplitLayer
from shoal.parallel.tensor.summa import Grid, SummaLinear, bias_cuts, block_cuts, unturned


def block_layers(region: Region, grid: Grid) -> list[SplitLayer]:
    """The column and row layers of a closed region. Raises `LayoutError` for features or heads that do not divide."""
    back = unturned if region.head_size is None else partial(leave_heads, grid=grid)
    columns = [
        _in_blocks(region.full_name(name), layer, grid, after=_to_heads(region, name, grid))
        for name, layer in region.columns.items()
    ]
    rows = [_in_blocks(region.full_name(name), layer, grid, before=back) for name, layer in region.rows.items()]
    return columns + rows


def _to_heads(region: Region, name: str, grid: Grid) -> Callable[[Tensor], Tensor]:
    """From the blocks that a column layer gives to the heads of this rank."""
    unit = region.head_size
    if unit is None:
        return unturned
    heads, what = region.columns[name].out_features // unit, region.full_name(name)
    if heads % grid.size == 0:
        return partial(enter_heads, grid=grid)
    rows, columns = grid.column.size, grid.row.size
    if region.columns[name].out_features == region.inner_features or heads % columns or rows % (heads // columns):
        raise LayoutError(
            f"{what} has {heads} heads, on a grid of {rows} x {columns} ranks; they must be a multiple of {grid.size}, "
            f"or, where query heads share them, {columns} times a divisor of {rows}"
        )
    return partial(enter_heads, grid=grid, copies=rows // (heads // columns))


def _in_blocks(
    name: str,
    layer: nn.Linear,
    grid: Grid,
    *,
    before: Callable[[Tensor], Tensor] = unturned,
    after: Callable[[Tensor], Tensor] = unturned,
) -> SplitLayer:
    cuts = block_cuts(layer.out_features, layer.in_features, grid, what=name)
    made = partial(SummaLinear, grid=grid, before=before, after=after)
    return SplitLayer(name, layer, cuts, bias_cuts(layer.out_features, grid), made)
