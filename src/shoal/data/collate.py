"""Samples side by side as one batch.

Samples whose first dims differ in length are padded with zeros on the right; the weight of the padding is 0 (see
`denominator`). Everything else about them must agree, so that a batch does not depend on which samples meet in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.config import Denominator
from shoal.data.denominator import weigh
from shoal.data.sample import Batch, Sample, Tree, describe, parse_sample
from shoal.errors import UserCodeError


def collate(samples: Sequence[Any], positions: np.ndarray, *, denominator: Denominator = "auto") -> Batch:
    """The batch of `samples` (as a data set returns them, at least one) at `positions`, int64 [samples].

    Raises:
        UserCodeError: a sample is of a wrong form, or does not fit beside the first.
    """
    parsed = [parse_sample(sample) for sample in samples]
    inputs = _stack([sample.inputs for sample in parsed], "inputs")
    targets = _stack([sample.targets for sample in parsed], "targets")
    given = _stack_weights([sample.weights for sample in parsed])
    lengths = _lengths([sample.targets for sample in parsed], weighted=given is not None)
    weights = weigh(targets, lengths=lengths, given=given, denominator=denominator)
    return Batch(inputs, targets, weights=weights, positions=torch.from_numpy(np.array(positions, dtype=np.int64)))


def collate_stacked(stacked: Any, positions: np.ndarray, *, denominator: Denominator = "auto") -> Batch:
    """The batch of what a source's `samples_at(ids)` returned: samples of equal shape, stacked already.

    Raises:
        UserCodeError: it is of a wrong form, or not one row for each of `positions`.
    """
    parsed: Sample = parse_sample(stacked)
    for name, tree in (("inputs", parsed.inputs), ("targets", parsed.targets), ("weights", parsed.weights)):
        for leaf in _leaves(tree) if tree is not None else ():
            if leaf.ndim == 0 or len(leaf) != len(positions):
                raise UserCodeError(
                    f"samples_at() returned {name} of shape {tuple(leaf.shape)} for {len(positions)} ids: return one "
                    "row for each id."
                )
    weights = weigh(parsed.targets, lengths=None, given=parsed.weights, denominator=denominator)
    places = torch.from_numpy(np.array(positions, dtype=np.int64))
    return Batch(parsed.inputs, parsed.targets, weights=weights, positions=places)


def _leaves(tree: Tree) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree
    return [leaf for branch in branches for leaf in _leaves(branch)]


def _stack(trees: Sequence[Tree], name: str) -> Tree:
    """Stacks leaf by leaf, with a new leading dim; refuses trees of different structure."""
    first = trees[0]
    if isinstance(first, Tensor):
        return _stack_leaves([tree for tree in trees if isinstance(tree, Tensor)], name, expected=len(trees))
    for tree in trees:
        if type(tree) is not type(first) or _names(tree) != _names(first):
            raise UserCodeError(
                f"The data set's {name} are {describe(first)} in one sample and {describe(tree)} in another, or have "
                "other keys: return the same structure for every sample."
            )
    if isinstance(first, dict):
        return {key: _stack([_branch(tree, key) for tree in trees], f"{name}[{key!r}]") for key in first}
    return tuple(_stack([_branch(tree, i) for tree in trees], f"{name}[{i}]") for i in range(len(first)))


def _names(tree: Tree) -> set[Any]:
    return set(tree) if isinstance(tree, dict) else set(range(len(tree)))


def _branch(tree: Any, key: str | int) -> Tree:
    return tree[key]


def _stack_leaves(leaves: Sequence[Tensor], name: str, *, expected: int) -> Tensor:
    first = leaves[0]
    if len(leaves) != expected:
        raise UserCodeError(f"The data set's {name} are a tensor in some samples only: return the same for every one.")
    for leaf in leaves:
        if leaf.dtype != first.dtype or leaf.ndim != first.ndim or leaf.shape[1:] != first.shape[1:]:
            raise UserCodeError(
                f"The data set's {name} are {first.dtype} {tuple(first.shape)} in one sample and {leaf.dtype} "
                f"{tuple(leaf.shape)} in another: only the length of the first dim may differ."
            )
    if all(leaf.shape == first.shape for leaf in leaves):
        return torch.stack(list(leaves))
    return torch.nn.utils.rnn.pad_sequence(list(leaves), batch_first=True)


def _stack_weights(weights: Sequence[Tensor | None]) -> Tensor | None:
    """[samples] or, padded with zeros, [samples, positions]; None where the data set gives none."""
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) != len(weights):
        raise UserCodeError("The data set returned weights with some samples only: return them with all, or with none.")
    return _stack_leaves(given, "weights", expected=len(weights))


def _lengths(targets: Sequence[Tree], *, weighted: bool) -> Tensor | None:
    """int64 [samples] where the targets' lengths differ, else None."""
    leaves = [_leaves(tree) for tree in targets]
    lengths = [[len(leaf) if leaf.ndim else 1 for leaf in sample] for sample in leaves]
    if all(of_sample == lengths[0] for of_sample in lengths):
        return None
    if isinstance(targets[0], Tensor):
        return torch.tensor(lengths).flatten()
    if weighted:
        return None
    raise UserCodeError(
        "The targets are several tensors of different lengths, so padding would count: return weights with each sample."
    )
