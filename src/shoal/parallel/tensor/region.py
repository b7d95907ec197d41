"""Regions: modules that have layers of role `column` or `packed`, and, behind them, of role `row`.

The roles say what is split, but not always in which units, nor where in a module the whole stream ends:

    head_size    an integer attribute of the module (or head_dim): so many features of a layer stay together. The row
                 layer then has all query heads, a column layer with fewer is one of keys or values that they share.
    packs_heads  a module with heads says by this attribute that a column layer of several times the row layer's
                 features has all those of the first head, then all those of the next: its query, key and value.
    closed       all parameters of the module are those of its column layers and its one row layer, or act on single
                 heads between them. The module as a whole then takes the stream and gives it back.
    takes_blocks a module with heads says by this attribute that it reads no length off its input: on a grid its column
                 layers take a part of the tokens, and give all tokens of some heads.

A norm between column and row layers (`[head_size]`, as for queries and keys) sees the heads of its rank alone: its
gradient is one term of a sum, whereas a norm before the column layers sees the whole stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.errors import LayoutError, UserCodeError
from shoal.models.roles import is_conv1d
from shoal.parallel.tensor import operators
from shoal.parallel.tensor.layers import Crossing, Entrance, SplitLayer, change_input, change_output
from shoal.parallel.tensor.operators import gathered, linear_map
from shoal.parallel.tensor.summa import Grid, SummaLinear, bias_cuts, block_cuts, unturned
from shoal.topology.refusal import nearest_multiples

# Modules without a forward of their own that takes the stream, and chains, whose layers never share an input.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Linear:
    """A linear layer. `transposed`: its weight is `[in, out]`, as that of `transformers`' Conv1D, else `[out, in]`."""

    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool = False

    def dim_of(self, *, outputs: bool) -> int:
        """The dim of the weight along which its outputs lie, or, if not `outputs`, its inputs."""
        return int(outputs == self.transposed)


@dataclass(frozen=True)
class Region:
    """One such module: its name, and its layers by their names in it."""

    name: str
    module: nn.Module
    columns: dict[str, Linear]
    rows: dict[str, Linear]
    packed: dict[str, Linear]

    @property
    def head_size(self) -> int | None:
        """Features that stay together; None: each stands alone."""
        return getattr(self.module, "head_size", getattr(self.module, "head_dim", None))

    def unit_of(self, column: str) -> int | None:
        """Features of a column layer that stay together."""
        inner, features = self.inner_features, self.columns[column].out_features
        if self.head_size is None or inner is None or features <= inner:
            return self.head_size
        return self.head_size * (features // inner)

    @property
    def takes_blocks(self) -> bool:
        """May its layers lie in blocks on a grid?"""
        plain = not self.packed and not any(layer.transposed for layer in self.layers.values())
        return plain and (self.head_size is None or getattr(self.module, "takes_blocks", False))

    @property
    def inner_features(self) -> int | None:
        """Features between column and row layers, where that is one number."""
        single = len(self.rows) == 1 and not isinstance(self.module, CONTAINERS)
        return next(iter(self.rows.values())).in_features if single else None

    @property
    def per_head(self) -> list[str]:
        """Names, in the module, of the parameters that act on single heads."""
        own = [(name, p) for name, p in self.module.named_parameters() if name not in self._layer_parameters()]
        stream = {layer.in_features for layer in self.first.values()}
        return [
            name for name, p in own if self.head_size not in (None, *stream) and tuple(p.shape) == (self.head_size,)
        ]

    @property
    def closed(self) -> bool:
        """See above."""
        accounted = self._layer_parameters() | set(self.per_head)
        return self.inner_features is not None and {name for name, _ in self.module.named_parameters()} == accounted

    def full_name(self, child: str) -> str:
        """The name in the model of a thing of this module."""
        return f"{self.name}.{child}" if self.name else child

    @property
    def layers(self) -> dict[str, Linear]:
        """All of them."""
        return {**self.first, **self.rows}

    @property
    def first(self) -> dict[str, Linear]:
        """Those that take the stream."""
        return {**self.columns, **self.packed}

    def _layer_parameters(self) -> set[str]:
        return {
            f"{child}.{name}" for child, layer in self.layers.items() for name, _ in layer.module.named_parameters()
        }


def regions_of(model: nn.Module, kinds: Mapping[str, str]) -> list[Region]:
    """Every module of `model` with column or row layers among its children.

    `kinds` has the role of every parameter by each of its names. Raises `UserCodeError` for a layer that cannot be
    split, and for widths that do not tell which features belong together.
    """
    found = []
    for name, module in model.named_modules():
        columns, rows, packed = (_layers(name, module, kinds, kind) for kind in ("column", "row", "packed"))
        region = Region(name, module, columns, rows, packed)
        if region.layers:
            _check_widths(region)
            found.append(region)
    return found


def _layers(path: str, module: nn.Module, kinds: Mapping[str, str], kind: str) -> dict[str, Linear]:
    children = {name: f"{path}.{name}".lstrip(".") for name, _ in module.named_children()}
    wanted = [name for name, full in children.items() if kinds.get(f"{full}.weight") == kind]
    return {name: _linear(module.get_submodule(name), children[name], kind) for name in wanted}


def _linear(layer: nn.Module, name: str, kind: str) -> Linear:
    """`layer`, where it is one that can be split. Raises `UserCodeError`."""
    if is_conv1d(layer):
        inputs, outputs = cast(Tensor, layer.weight).shape
        return Linear(layer, inputs, outputs, transposed=True)
    found = linear(layer, name, kind)
    return Linear(found, found.in_features, found.out_features)


def linear(layer: nn.Module, name: str, kind: str) -> nn.Linear:
    """`layer`, where it is PyTorch's linear layer. Raises `UserCodeError`."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise UserCodeError(
            f"'{name}.weight' has the role '{kind}', but '{name}' is a {type(layer).__name__}; tensor parallelism "
            f"splits nn.Linear (and nn.Embedding) layers: use one, or give the parameter the role 'replicated'"
        )
    return layer


def _check_widths(region: Region) -> None:
    inner, unit = region.inner_features, region.head_size
    for child, layer in region.packed.items():
        if inner is None or layer.out_features % inner:
            raise UserCodeError(
                f"the packed layer '{region.full_name(child)}' has {layer.out_features} features, and the row layer "
                f"beside it takes {inner}: a packed layer has several blocks of as many features as the one row layer "
                "of its module takes; give it the role 'replicated'"
            )
    for child, layer in region.columns.items():
        if inner is None or layer.out_features == inner or (unit is not None and layer.out_features < inner):
            continue
        if unit is not None and getattr(region.module, "packs_heads", False) and layer.out_features % inner == 0:
            continue
        raise UserCodeError(
            f"the column layer '{region.full_name(child)}' has {layer.out_features} features and the row layer beside "
            f"it takes {inner}; tensor parallelism cuts both alike: make layers of {inner} features, or, for fewer key "
            f"than query heads, give {type(region.module).__name__} an attribute head_size"
        )


# Blocks: the way into regions whose layers lie in blocks on a grid (`shoal.parallel.tensor.summa`), and out of them.
#
# Rank (i, j) of a grid of R x C works on the block of the stream `[batch, seq, width]` with the i-th of R parts of
# every sequence and the j-th of C parts of the features. Ranks stand in the grid row by row, so that under sequence
# parallelism the slices of a row of the grid are one part of the sequence, and an exchange within the row makes the
# block.
#
# Attention needs all tokens of a head. Behind the projections a block has the heads of its column and the tokens of its
# row; an exchange within the column gives each of its ranks an R-th of the heads with all tokens, and one back.


class Turn(Protocol):
    """An exchange along a line of the grid."""

    def __call__(self, x: Tensor, line: Collective) -> Tensor: ...


def enter_block(x: Tensor, grid: Grid) -> Tensor:
    """The whole stream to this rank's block. Raises `LayoutError` where the sequence does not divide."""
    return linear_map(x, partial(_block, grid=grid), adjoint=partial(_joined, grid=grid))


def leave_block(x: Tensor, grid: Grid) -> Tensor:
    """This rank's block to the whole stream."""
    return linear_map(x, partial(_joined, grid=grid), adjoint=partial(_block, grid=grid))


def enter_block_sequence(x: Tensor, grid: Grid) -> Tensor:
    """This rank's slice `[batch, seq / (R C), width]` of the stream to its block."""
    return _turned(x, grid.row, _tokens_for_features, _features_for_tokens)


def leave_block_sequence(x: Tensor, grid: Grid) -> Tensor:
    """This rank's block to its slice of the stream."""
    return _turned(x, grid.row, _features_for_tokens, _tokens_for_features)


def enter_heads(x: Tensor, grid: Grid, *, copies: int = 1) -> Tensor:
    """Of the heads in this rank's block, the R-th part with all tokens: `[batch, seq / R, heads x size]` to `[batch,
    seq, heads copies / R x size]`. Each head is for `copies` ranks of the column, where there are fewer than ranks."""
    if copies > 1:
        heads = x.unflatten(2, (grid.column.size // copies, -1))
        x = heads.repeat_interleave(copies, dim=2).flatten(2)
    return _turned(x, grid.column, _tokens_for_features, _features_for_tokens)


def leave_heads(x: Tensor, grid: Grid) -> Tensor:
    """The inverse for `copies` 1: back to the block that has all of a column's heads and this row's tokens."""
    return _turned(x, grid.column, _features_for_tokens, _tokens_for_features)


def _turned(x: Tensor, line: Collective, there: Turn, back: Turn) -> Tensor:
    return linear_map(x, partial(there, line=line), adjoint=partial(back, line=line))


def _block(x: Tensor, grid: Grid) -> Tensor:
    rows, columns = grid.column.size, grid.row.size
    if x.shape[1] % rows:
        nearest = " or ".join(map(str, nearest_multiples(rows, x.shape[1])))
        raise LayoutError(
            f"a sequence of {x.shape[1]} tokens cannot be split evenly over the {rows} rows of a grid of ranks; "
            f"nearest: {nearest} tokens"
        )
    blocks = x.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
    return blocks[:, grid.column.rank, :, grid.row.rank].contiguous()


def _joined(block: Tensor, grid: Grid) -> Tensor:
    part = gathered(block.transpose(1, 2), grid.row).transpose(1, 2)
    return gathered(part, grid.column)


def _tokens_for_features(x: Tensor, line: Collective) -> Tensor:
    """`[batch, seq, width]` of each rank of a line: features go out, tokens come in."""
    sent = x.unflatten(2, (line.size, -1)).movedim(2, 0).contiguous()
    return _exchanged(sent, line).transpose(0, 1).flatten(1, 2)


def _features_for_tokens(x: Tensor, line: Collective) -> Tensor:
    """The inverse: tokens go out, features come in."""
    sent = x.unflatten(1, (line.size, -1)).transpose(0, 1).contiguous()
    return _exchanged(sent, line).movedim(0, 2).flatten(2, 3)


def _exchanged(sent: Tensor, line: Collective) -> Tensor:
    received = torch.empty_like(sent)
    line.all_to_all(received, sent).wait()
    return received


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
    layer: Linear,
    grid: Grid,
    *,
    before: Callable[[Tensor], Tensor] = unturned,
    after: Callable[[Tensor], Tensor] = unturned,
) -> SplitLayer:
    cuts = block_cuts(layer.out_features, layer.in_features, grid, what=name)
    made = partial(SummaLinear, grid=grid, before=before, after=after)
    return SplitLayer(name, layer.module, cuts, bias_cuts(layer.out_features, grid), made)


# How activations get into split layers and out of them: whole or in slices, along one axis or in blocks.


@dataclass(frozen=True)
class Crossings:
    """The operators between the stream and the split layers of one group."""

    group: Collective
    sequence_parallel: bool
    grid: Grid | None = None

    @property
    def enter(self) -> Crossing:
        """From the stream to all of the sequence, on the way to a part of the features."""
        return partial(operators.enter_sequence if self.sequence_parallel else operators.enter, group=self.group)

    @property
    def leave(self) -> Crossing:
        """From one term of a sum to the stream."""
        return partial(operators.leave_sequence if self.sequence_parallel else operators.leave, group=self.group)

    def entrances(self, region: Region) -> dict[str, Crossing]:
        """For each layer of `region` that takes the stream, what it does to its input."""
        if self.gathers_at(region):
            return dict.fromkeys(region.first, _inside)
        if isinstance(region.module, CONTAINERS):
            return dict.fromkeys(region.first, self.enter)
        return dict.fromkeys(region.first, Entrance(self.enter, len(region.first)))

    def gathers_at(self, region: Region) -> bool:
        """Does the whole module get the gathered sequence, so that its code sees one length throughout?"""
        return self.sequence_parallel and region.closed

    def grid_of(self, region: Region) -> Grid | None:
        """The grid on which the layers of `region` lie in blocks, where they do."""
        return self.grid if region.closed and region.takes_blocks else None

    def install(self, region: Region) -> bool:
        """Lets the whole module get what it needs, by hooks; is it now one that sees more than the stream outside?"""
        grid = self.grid_of(region)
        if grid is not None:
            there, back = _BLOCKS_OF_SLICES if self.sequence_parallel else _BLOCKS
            change_input(region.module, partial(there, grid=grid))
            change_output(region.module, partial(back, grid=grid))
        elif self.gathers_at(region):
            change_input(region.module, self.enter)
        return grid is not None or self.gathers_at(region)


_BLOCKS = (enter_block, leave_block)
_BLOCKS_OF_SLICES = (enter_block_sequence, leave_block_sequence)


def _inside(x: Tensor) -> Tensor:
    return x
