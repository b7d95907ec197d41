"""Tensor parallelism of a model, derived from the roles that it declares (`shoal.models.roles`).

    column       rows of the weight, and their biases      the first of a pair: its input is the whole stream
    row          columns of the weight                     the second: its outputs are summed, then the bias is added
    embedding    rows, unevenly where they do not divide   the ranks' vectors are summed
    head         rows, the same way                        logits stay split: `shoal.parallel.tensor.vocabulary`
    packed       a part of the rows of every block            queries, keys and values in one matrix
    the others   whole on every rank

Parameters stay plain tensors under the names of the unsplit model. Experts are left to expert parallelism; a router
then sees an equal share of the tokens on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from functools import partial

import torch
from torch import nn

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.models.roles import DeclaresCounts, DeclaresRoles, role_of, roles_of
from shoal.models.sample_places import Extent, Inside
from shoal.parallel.tensor.layers import (
    ColumnLinear,
    Cut,
    Cuts,
    PackedLinear,
    RowLinear,
    SplitLayer,
    VocabularyEmbedding,
    check_ties,
    even_cut,
    grouped_cut,
    replace,
    slice_positions,
    uneven_cut,
)
from shoal.parallel.tensor.region import Crossings, Region, block_layers, linear, regions_of
from shoal.parallel.tensor.summa import Grid
from shoal.parallel.tensor.vocabulary import VocabularySplit
from shoal.topology.holding import Box, Dims

SPLIT_ROLES = ("column", "row", "packed", "embedding", "head")


@dataclass(frozen=True)
class TensorPart:
    """What this rank holds of one parameter of the unsplit model: `length` slices along `dim` from `offset`.

    `dim` None: all of it (`length` is then that of dimension 0). `inner`: of those slices, (offset, length) along
    dimension 1, where layers lie in blocks. `block`: the slices are those of every so many, which lie one after the
    other on the rank (`shoal.parallel.tensor.layers.part_of`). `twins` are the places along `tensor` that hold the
    same part; where `partial`, each of them computes one term of its gradient, else each the whole.
    """

    dim: int | None
    offset: int
    length: int
    twins: tuple[int, ...]
    partial: bool
    inner: tuple[int, int] | None = None
    block: int | None = None

    def boxes(self, global_shape: Dims) -> tuple[Box, ...]:
        """The same as boxes of the unsplit parameter, in the order in which they lie on the rank."""
        if self.dim is None or self.block is None:
            return (self._box(global_shape, self.offset),)
        starts = range(self.offset, global_shape[self.dim], self.block)
        return tuple(self._box(global_shape, start) for start in starts)

    def _box(self, global_shape: Dims, start: int) -> Box:
        offset, shape = [0] * len(global_shape), list(global_shape)
        if self.dim is not None:
            offset[self.dim], shape[self.dim] = start, self.length
        if self.inner is not None:
            offset[1], shape[1] = self.inner
        return Box(tuple(offset), tuple(shape))


@dataclass(frozen=True)
class TensorPlan:
    """The part of every parameter but experts', by its first name; and how the logits are split, where they are.

    `columns` say of the column layers, by name, what part of the features follows; `rows` end it.
    """

    parts: dict[str, TensorPart]
    vocabulary: VocabularySplit | None
    columns: Mapping[str, Inside] = field(default_factory=dict)
    rows: frozenset[str] = frozenset()


def split_tensor(
    model: nn.Module, group: Collective, *, sequence_parallel: bool, grid: Grid | None = None
) -> TensorPlan:
    """Leaves in `model`, in place, this rank's part of every layer with a split role; says what it holds now.

    Takes parameters of any device, "meta" too; ties stay ties. `forward` then takes the same inputs on every rank, and
    gives whole outputs or, behind a layer of role head, this rank's part of the classes. With `sequence_parallel` the
    activations outside of regions are slices `[batch, seq / size, ...]`. With a `grid`, in which the places of `group`
    stand row by row, the layers of closed regions (attention, feed-forward) lie in blocks on it: `...tensor.summa`.

    Raises:
        UserCodeError: the model declares no roles, or layers that cannot be split; it is left as it was.
        LayoutError: heads or features do not divide; it is left as it was.
    """
    if group.size == 1:
        return TensorPlan(_parts(model, _kinds(model), [], 1, partial=set()), None)
    if not isinstance(model, DeclaresRoles):
        raise UserCodeError(
            f"{type(model).__name__} declares no roles of its parameters, and tensor={group.size} splits by them; let "
            "`shoal split` propose them, give it a method parameter_roles() (see shoal.models.roles), or set tensor=1"
        )
    if grid is not None and (grid.size, grid.place) != (group.size, group.rank):
        raise ValueError(
            f"a grid of {grid.size} ranks, this one at {grid.place}: it must be those of the group, in order"
        )
    kinds, crossings, shares = _kinds(model), Crossings(group, sequence_parallel, grid), _shares(model, group.size)
    regions = regions_of(model, kinds)
    layers = [layer for region in regions for layer in _layers_of(region, crossings)]
    layers += _vocabulary_layers(model, kinds, crossings)
    _check(model, kinds, layers, sequence_parallel=sequence_parallel)
    terms = {region.full_name(name) for region in regions for name in region.per_head}
    terms |= {name for name, kind in kinds.items() if sequence_parallel or kind == "router"}
    parts = _parts(model, kinds, layers, group.size, partial=terms)
    vocabulary = _vocabulary_split(layers, kinds)
    replace(model, layers)
    for module, name, share in shares:
        setattr(module, name, share)
    inside = [region.module for region in regions if crossings.install(region)]
    if sequence_parallel:
        slice_positions(model, group, inside=inside)
    columns = {region.full_name(name): _inside(region, crossings) for region in regions for name in region.first}
    rows = frozenset(region.full_name(name) for region in regions for name in region.rows)
    return TensorPlan(parts, vocabulary, columns, rows)


def _shares(model: nn.Module, size: int) -> list[tuple[nn.Module, str, int]]:
    """A rank's share of each count that the model declares. Raises `LayoutError` for one that does not divide."""
    found, modules = [], dict(model.named_modules())
    for name in model.tensor_counts() if isinstance(model, DeclaresCounts) else ():
        path, _, attribute = name.rpartition(".")
        if path in modules and hasattr(modules[path], attribute):  # else another stage has it
            value = getattr(modules[path], attribute)
            found.append((modules[path], attribute, even_cut(value, 0, size, what=name).length))
    return found


def _inside(region: Region, crossings: Crossings) -> Inside:
    """The features between the column and row layers of a region, and the heads that they are, on this rank."""
    if crossings.grid_of(region) is not None or not region.rows:
        return Inside(None)
    row, unit = next(iter(region.rows.values())), region.head_size
    cut = even_cut(row.in_features, crossings.group.rank, crossings.group.size, what=region.name, unit=unit or 1)
    features = Extent(torch.arange(cut.offset, cut.offset + cut.length), row.in_features)
    if unit is None:
        return Inside(features)
    first, heads = cut.offset // unit, cut.length // unit
    return Inside(features, Extent(torch.arange(first, first + heads), row.in_features // unit))


def _kinds(model: nn.Module) -> dict[str, str]:
    """The kind of every parameter, by each of its names."""
    kinds: dict[str, str] = {name: role.kind for name, role in roles_of(model).items()}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: kinds[name] if name in kinds else role_of(model, name).kind for name in names}


def _layers_of(region: Region, crossings: Crossings) -> list[SplitLayer]:
    """The column and row layers of one region, each with its cut."""
    grid = crossings.grid_of(region)
    if grid is not None:
        return block_layers(region, grid)
    entrances, layers = crossings.entrances(region), []
    for name, layer in region.columns.items():
        cuts = {0: _column_cut(region, name, crossings.group)}
        made = partial(ColumnLinear, entrance=entrances[name], transposed=layer.transposed)
        split = {layer.dim_of(outputs=True): cuts[0]}
        layers.append(SplitLayer(region.full_name(name), layer.module, split, cuts, made))
    for name, layer in region.packed.items():
        block = region.inner_features
        assert block is not None
        cut = replace_fields(_even(region, name, block, crossings.group), block=block)
        made = partial(PackedLinear, entrance=entrances[name], transposed=layer.transposed)
        split = {layer.dim_of(outputs=True): cut}
        layers.append(SplitLayer(region.full_name(name), layer.module, split, {0: cut}, made))
    for name, layer in region.rows.items():
        cuts = {layer.dim_of(outputs=False): _even(region, name, layer.in_features, crossings.group)}
        made = partial(RowLinear, leave=crossings.leave, transposed=layer.transposed)
        layers.append(SplitLayer(region.full_name(name), layer.module, cuts, {}, made))
    return layers


def _column_cut(region: Region, name: str, group: Collective) -> Cut:
    features, unit, inner = region.columns[name].out_features, region.head_size, region.inner_features
    if unit is None or inner is None or features >= inner:
        what, unit = region.full_name(name), region.unit_of(name)
        return even_cut(features, group.rank, group.size, what=what, unit=unit or 1)
    return grouped_cut(
        features, group.rank, group.size, what=region.full_name(name), unit=unit, heads=inner // unit
    )  # fmt: skip


def _even(region: Region, name: str, features: int, group: Collective) -> Cut:
    return even_cut(features, group.rank, group.size, what=region.full_name(name), unit=region.head_size or 1)


def _vocabulary_layers(model: nn.Module, kinds: Mapping[str, str], crossings: Crossings) -> list[SplitLayer]:
    """The embeddings and heads, cut by their rows."""
    layers = []
    for name, module in model.named_modules():
        kind = kinds.get(f"{name}.weight")
        if kind not in ("embedding", "head"):
            continue
        if isinstance(module, nn.Embedding):
            layers.append(_split_embedding(name, module, crossings))
        else:
            layer = linear(module, name, kind)
            cut = uneven_cut(layer.out_features, crossings.group.rank, crossings.group.size)
            made = partial(ColumnLinear, entrance=crossings.enter)
            layers.append(SplitLayer(name, layer, {0: cut}, {0: cut}, made))
    return layers


def _split_embedding(name: str, module: nn.Embedding, crossings: Crossings) -> SplitLayer:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UserCodeError(
            f"the embedding '{name}' uses max_norm, scale_grad_by_freq or sparse, which a split embedding has not; "
            f"leave them out, or give it the role 'replicated'"
        )
    total = module.num_embeddings
    cut = uneven_cut(total, crossings.group.rank, crossings.group.size)
    padding, leave = module.padding_idx, crossings.leave
    return SplitLayer(
        name, module, {0: cut}, {},
        lambda weight, bias: VocabularyEmbedding(weight, cut, total=total, padding=padding, leave=leave),
    )  # fmt: skip


def _check(model: nn.Module, kinds: Mapping[str, str], layers: list[SplitLayer], *, sequence_parallel: bool) -> None:
    """Raises `UserCodeError` for a role that no layer can follow."""
    check_ties(layers)
    followed = {id(parameter) for layer in layers for parameter in layer.layer.parameters()}
    for name, parameter in model.named_parameters():
        kind = kinds[name]
        if kind in SPLIT_ROLES and id(parameter) not in followed:
            raise UserCodeError(
                f"'{name}' has the role '{kind}', but is not the parameter of an nn.Linear or nn.Embedding that tensor "
                f"parallelism could split; use such a layer, or give it the role 'replicated'"
            )
    if sequence_parallel and "embedding" not in {role.kind for role in model.parameter_roles().values()}:  # pyright: ignore
        raise UserCodeError(
            f"{type(model).__name__} has no embedding, whose outputs sequence parallelism splits along the sequence; "
            f"turn sequence parallelism off, or give the first layer's weight the role 'embedding'"
        )


def _parts(
    model: nn.Module, kinds: Mapping[str, str], layers: list[SplitLayer], size: int, *, partial: set[str]
) -> dict[str, TensorPart]:
    """The part of every parameter. `partial`: of those that are whole everywhere, the ones with terms of gradients."""
    split = {name: cuts for layer in layers for name, cuts in layer.split_parameters()}
    parts = {}
    for name, parameter in model.named_parameters():
        if name in split:
            parts[name] = _split_part(split[name])
        elif kinds[name] != "expert":
            length = parameter.shape[0] if parameter.ndim else 1
            parts[name] = TensorPart(None, 0, length, tuple(range(size)), partial=name in partial)
    return parts


def _split_part(cuts: Cuts) -> TensorPart:
    """Twins of a split parameter each have a term of its gradient: those who share a head, or a column of a grid."""
    (dim, cut), *others = cuts.items()
    inner = (others[0][1].offset, others[0][1].length) if others else None
    return TensorPart(dim, cut.offset, cut.length, cut.twins, len(cut.twins) > 1, inner, cut.block)


def _vocabulary_split(layers: list[SplitLayer], kinds: Mapping[str, str]) -> VocabularySplit | None:
    for layer in layers:
        if kinds[f"{layer.name}.weight"] == "head":
            cut = layer.weight[0]
            return VocabularySplit(cut.offset, cut.length, layer.own_weight.shape[0])
    return None
