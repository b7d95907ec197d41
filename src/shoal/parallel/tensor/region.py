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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.parallel.tensor.layers import is_conv1d

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
