"""Hidden features: what the column layers of a pair make and its row layer reads (`shoal.models.roles`).

    gate, up  [features, width]   a feature is a row      down  [width, features]   a feature is a column

Masked together over all of them, a feature computes nothing, and can be taken out of the model: its layers get smaller,
and every device computes less. So a pattern that masks features is the one that shrinks a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import ConfigError, UsageError
from shoal.topology.box import Dims


@dataclass(frozen=True)
class FeatureGroup:
    """The layers that share `size` hidden features, each with the dim along which they lie."""

    dims: Mapping[str, int]
    size: int

    @property
    def leader(self) -> str:
        """The first of them, whose owner decides for all."""
        return next(iter(self.dims))


def feature_groups(shapes: Mapping[str, Dims], kinds: Mapping[str, str]) -> list[FeatureGroup]:
    """The groups that the layers of `shapes` make, by the modules that hold them; `kinds` are their roles.

    Raises `ConfigError` for a layer that is in no group.
    """
    by_module: dict[str, list[str]] = {}
    for name in shapes:
        by_module.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    found = []
    for names in by_module.values():
        dims = {name: {"column": 0, "row": 1}.get(kinds[name]) for name in names}
        sizes = {shapes[name][dim] for name, dim in dims.items() if dim is not None}
        known = {name: dim for name, dim in dims.items() if dim is not None}
        if len(known) < len(names) or len(sizes) != 1 or set(known.values()) != {0, 1}:
            raise ConfigError(
                f'sparsity.pattern = "features": {names[0]} is not of layers that make and read the same features, '
                'declared as "column" and "row"; name those in sparsity.layers, such as "*.feed_forward.*"'
            )
        found.append(FeatureGroup(known, sizes.pop()))
    return found


def feature_scores(group: FeatureGroup, scores: Mapping[str, Tensor]) -> Tensor:
    """The score of each feature `[size]`: the mean over all weights that make or read it."""
    parts = [scores[name].transpose(0, dim).flatten(1) for name, dim in group.dims.items()]
    return torch.cat(parts, dim=1).mean(1)


def feature_mask(kept: Tensor, dim: int, shape: Dims) -> Tensor:
    """The mask of a layer whose features lie along `dim`."""
    return kept.view(*(-1 if each == dim else 1 for each in range(len(shape)))).expand(shape)


def shrunk(
    weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], groups: list[FeatureGroup]
) -> tuple[dict[str, Tensor], int]:
    """The weights of the model without its masked features, and how many features each group has left.

    Raises `UsageError` where groups would differ: a model has one number of them.
    """
    found, left = dict(weights), set[int]()
    for group in groups:
        kept = torch.stack([_kept(masks[name], dim) for name, dim in group.dims.items()]).any(0)
        left.add(int(kept.sum()))
        for name, dim in group.dims.items():
            found[name] = weights[name].index_select(dim, kept.nonzero().flatten()).contiguous()
    if len(left) != 1:
        raise UsageError(
            f"blocks would have from {min(left)} to {max(left)} features, and this model has one number of them: prune "
            'with sparsity.distribution = "uniform"'
        )
    return found, left.pop()


def _kept(mask: Tensor, dim: int) -> Tensor:
    return mask.transpose(0, dim).flatten(1).any(1)
