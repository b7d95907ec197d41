"""Units that can be taken out of a model, each with all layers that make or read it (`shoal.models.roles`).

    feature   gate, up [features, width]: a row each               down [width, features]: a column each
    head      query, key, value [heads x size, width]: some rows   output [width, heads x size]: as many columns
    expert    gate, up, down [experts, ...] and the router [experts, width]: a slice each

Masked together over all of them, a feature or head computes nothing, and can be taken out: layers get smaller, and
every device computes less. A key head goes with the query heads that share it. A masked expert would still be chosen
by its router: experts are taken out, or stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from shoal.errors import ConfigError, UsageError
from shoal.models.roles import AS_IT_IS, Stored
from shoal.topology.holding import Dims


@dataclass(frozen=True)
class UnitGroup:
    """The layers that share `size` units, each with the dim along which these lie, of one length in a layer. Weights of
    those in `turned` have inputs before outputs.
    """

    dims: Mapping[str, int]
    size: int
    turned: frozenset[str] = frozenset()

    @property
    def leader(self) -> str:
        """The first of them, whose owner decides for all."""
        return next(iter(self.dims))


def unit_groups(
    shapes: Mapping[str, Dims],
    kinds: Mapping[str, str],
    *,
    pattern: str,
    heads: int | None = None,
    stored: Mapping[str, Stored] = MappingProxyType({}),
) -> list[UnitGroup]:
    """The groups that the layers of `shapes` make, by the modules that hold them; `kinds` are their roles. `heads`, for
    `pattern = "heads"`: how many key heads there are. `stored`: see `Owners`.

    Raises `ConfigError` for a layer that is in no group.
    """
    by_module: dict[str, list[str]] = {}
    for name in shapes:
        by_module.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    found = []
    for names in by_module.values():
        made = {name: kinds[name] == "column" for name in names if kinds[name] in ("column", "row")}
        turned = frozenset(name for name in made if stored.get(name, AS_IT_IS).turned)
        dims = {name: int(made[name] == (name in turned)) for name in made}
        lengths = {shapes[name][dim] for name, dim in dims.items()}
        sizes = lengths if heads is None else {heads}
        divided = all(length % size == 0 for length in lengths for size in sizes)
        if len(dims) < len(names) or len(sizes) != 1 or set(made.values()) != {True, False} or not divided:
            example = "*.attention.*" if heads else "*.feed_forward.*"
            raise ConfigError(
                f'sparsity.pattern = "{pattern}": {names[0]} is not of layers that make and read the same {pattern}, '
                f'declared as "column" and "row"; name those in sparsity.layers, such as "{example}"'
            )
        found.append(UnitGroup(dims, sizes.pop(), turned))
    return found


def expert_groups(shapes: Mapping[str, Dims]) -> list[UnitGroup]:
    """The stacked experts of each mixture, with its router, by the names of all tensors of a model.

    Raises `UsageError` for experts that are not weights `[experts, ..., ...]`, with biases `[experts, ...]`.
    """
    found: dict[str, dict[str, int]] = {}
    for name in shapes:
        mixture, stacked, _ = name.partition(".experts.")
        if stacked:
            found.setdefault(mixture, {})[name] = 0
    groups = []
    for mixture, dims in found.items():
        size = next((shapes[name][0] for name in dims if len(shapes[name]) == 3), None)
        other = next((name for name in dims if len(shapes[name]) < 2 or shapes[name][0] != size), None)
        if size is None or other is not None:
            name = other or next(iter(dims))
            raise UsageError(
                f"{name} of {list(shapes[name])} does not hold one expert a row of its first dimension, as a layer "
                "[experts, ..., ...] does: only such experts can be taken out"
            )
        routers = [n for n in shapes if n.startswith((f"{mixture}.router.", f"{mixture}.gate.")) and shapes[n]]
        dims |= {name: 0 for name in routers if shapes[name][0] == size}
        groups.append(UnitGroup(dims, size))
    return groups


def unit_scores(group: UnitGroup, scores: Mapping[str, Tensor]) -> Tensor:
    """The score of each unit `[size]`: the mean over all weights that make or read it."""
    parts = [scores[name].transpose(0, dim).reshape(group.size, -1) for name, dim in group.dims.items()]
    return torch.cat(parts, dim=1).mean(1)


def unit_mask(kept: Tensor, dim: int, shape: Dims) -> Tensor:
    """The mask of a layer whose units lie along `dim`."""
    each = kept.repeat_interleave(shape[dim] // kept.numel())
    return each.view(*(-1 if place == dim else 1 for place in range(len(shape)))).expand(shape)


def kept_units(group: UnitGroup, masks: Mapping[str, Tensor]) -> Tensor:
    """The units `[size]` of which a mask keeps something."""
    parts = [masks[name].transpose(0, dim).reshape(group.size, -1).any(1) for name, dim in group.dims.items()]
    return torch.stack(parts).any(0)


def shrunk(
    weights: Mapping[str, Tensor], groups: Sequence[UnitGroup], kept: Sequence[Tensor]
) -> tuple[dict[str, Tensor], int]:
    """The weights of the model with the `kept` units `[size]` of each group alone, biases as well, and how many that
    is.

    Raises `UsageError` where groups would differ: a model has one number of them.
    """
    left = {int(each.sum()) for each in kept}
    if len(left) != 1:
        raise UsageError(
            f"blocks would have from {min(left)} to {max(left)} of them, and this model has one number: prune with "
            'sparsity.distribution = "uniform"'
        )
    found = dict(weights)
    for group, units in zip(groups, kept, strict=True):
        for name, dim in group.dims.items():
            places = units.repeat_interleave(weights[name].shape[dim] // group.size).nonzero().flatten()
            found[name] = weights[name].index_select(dim, places).contiguous()
            bias = f"{name.removesuffix('.weight')}.bias"
            if (dim == 1) == (name in group.turned) and bias in weights and bias not in group.dims:
                found[bias] = weights[bias].index_select(0, places).contiguous()
    return found, left.pop()
