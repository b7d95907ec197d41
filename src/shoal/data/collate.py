"""Samples side by side as one batch.

Samples whose first dims differ in length are padded with zeros on the right; the weight of the padding is 0 (see
`denominator`). In a loop of the user's own nothing knows of a padding, and none is made. Everything else about them
must agree, so that a batch does not depend on which samples meet in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.config import Denominator
from shoal.data.inputs import PACKED
from shoal.data.sample import Batch, Sample, Tree, describe, leaves, parse_sample
from shoal.errors import UserCodeError

# What the loss is averaged over, as a weight for every loss.
#
# A step's loss is sum(losses * weights) / sum(weights), both sums over the whole global batch. With the weights
#
#     tokens    1 at each real target position
#     samples   1 for each sample in total: 1 / (its real positions) at each of them where targets are sequences
#     weights   the data set's own; one number for a sequence is spread over its real positions
#
# the average does not see padding, accumulation or the number of replicas: a weight depends on its own sample alone. A
# *real* position is within the sample's length and, for integer targets, not -100, which PyTorch's cross-entropy
# ignores. Targets are *sequences* when they are integers with a dim beyond the samples'.


IGNORED = -100  # `ignore_index` of torch.nn.functional.cross_entropy


def weigh(targets: Tree, *, lengths: Tensor | None, given: Tensor | None, denominator: Denominator) -> Tensor:
    """The weights of the losses of a batch: float [samples] or, for sequences, the shape of `targets`.

    Args:
        targets: stacked, padded on the right of their first dim.
        lengths: int64 [samples], the targets' lengths before padding; None where they were all equal.
        given: the data set's own weights, [samples] or [samples, positions]; None where it has none.
        denominator: what to average over; an explicit "samples" or "tokens" overrides given weights.

    Raises:
        UserCodeError: the data set does not return what `denominator` needs.
    """
    if denominator == "weights" and given is None:
        raise UserCodeError(
            "batch.denominator is 'weights', and the data set returns none: return (inputs, targets, weights)."
        )
    if denominator == "auto":
        denominator = "weights" if given is not None else "tokens" if _are_sequences(targets) else "samples"
    if denominator == "tokens" and not isinstance(targets, Tensor):
        raise UserCodeError(
            f"batch.denominator is 'tokens', and the targets are {describe(targets)}: it needs one tensor; return "
            "weights with each sample instead."
        )
    own = given if denominator == "weights" else None
    by_position = denominator == "tokens" or _are_sequences(targets) or (own is not None and own.ndim > 1)
    real = _real(targets, lengths, by_position=by_position)
    if denominator == "tokens":
        return real
    return _spread(torch.ones(len(real)) if own is None else own, real)


def _are_sequences(targets: Tree) -> bool:
    return isinstance(targets, Tensor) and targets.ndim >= 2 and _is_integer(targets)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _real(targets: Tree, lengths: Tensor | None, *, by_position: bool) -> Tensor:
    """1 where there is a loss that counts and 0 elsewhere: [samples], or by position."""
    if not isinstance(targets, Tensor):
        return torch.ones(_samples(targets))
    counts = (targets != IGNORED) if _is_integer(targets) else torch.ones(targets.shape[:2], dtype=torch.bool)
    if not by_position:
        if lengths is not None:
            raise UserCodeError(
                "The targets are real numbers in sequences of different lengths, so padding would count: set "
                "batch.denominator to 'tokens', or return targets of one length."
            )
        return counts.float() if counts.ndim == 1 else torch.ones(len(counts))
    if lengths is not None:
        inside = torch.arange(targets.shape[1]) < lengths[:, None]
        counts = counts & _widen(inside, counts.ndim)
    return counts.float()


def _samples(targets: Tree) -> int:
    while not isinstance(targets, Tensor):
        targets = next(iter(targets.values())) if isinstance(targets, dict) else targets[0]
    return len(targets)


def _spread(weights: Tensor, real: Tensor) -> Tensor:
    """Weights of whole samples divided over their real positions; weights of positions kept at the real ones."""
    if weights.ndim == 1 and real.ndim > 1:
        weights = weights / real.flatten(1).sum(1).clamp(min=1)
    dims = max(weights.ndim, real.ndim)
    return _widen(weights, dims) * _widen(real, dims)


def _widen(tensor: Tensor, dims: int) -> Tensor:
    """`tensor` with dims of one appended, until it has `dims`."""
    return tensor.reshape(*tensor.shape, *[1] * (dims - tensor.ndim))


def collate(samples: Sequence[Any], positions: np.ndarray, *, denominator: Denominator = "auto") -> Batch:
    """The batch of `samples` (as a data set returns them, at least one) at `positions`, int64 [samples].

    Raises:
        UserCodeError: a sample is of a wrong form, or does not fit beside the first.
    """
    parsed = [parse_sample(sample) for sample in samples]
    inputs = _stack([sample.inputs for sample in parsed], "inputs", pads=all(sample.pads for sample in parsed))
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
        for leaf in leaves(tree) if tree is not None else ():
            if leaf.ndim == 0 or len(leaf) != len(positions):
                raise UserCodeError(
                    f"samples_at() returned {name} of shape {tuple(leaf.shape)} for {len(positions)} ids: return one "
                    "row for each id."
                )
    weights = weigh(parsed.targets, lengths=None, given=parsed.weights, denominator=denominator)
    places = torch.from_numpy(np.array(positions, dtype=np.int64))
    return Batch(parsed.inputs, parsed.targets, weights=weights, positions=places)


def _stack(trees: Sequence[Tree], name: str, *, pads: bool = True) -> Tree:
    """Stacks leaf by leaf, with a new leading dim; refuses trees of different structure."""
    first = trees[0]
    if isinstance(first, Tensor):
        tensors = [tree for tree in trees if isinstance(tree, Tensor)]
        return _stack_leaves(tensors, name, expected=len(trees), pads=pads)
    for tree in trees:
        if type(tree) is not type(first) or _names(tree) != _names(first):
            raise UserCodeError(
                f"The data set's {name} are {describe(first)} in one sample and {describe(tree)} in another, or have "
                "other keys: return the same structure for every sample."
            )
    if isinstance(first, dict):
        return {
            key: _stack([_branch(tree, key) for tree in trees], f"{name}[{key!r}]", pads=pads or key in PACKED)
            for key in first
        }
    branches = ([_branch(tree, i) for tree in trees] for i in range(len(first)))
    return tuple(_stack(each, f"{name}[{i}]", pads=pads) for i, each in enumerate(branches))


def _names(tree: Tree) -> set[Any]:
    return set(tree) if isinstance(tree, dict) else set(range(len(tree)))


def _branch(tree: Any, key: str | int) -> Tree:
    return tree[key]


def _stack_leaves(tensors: Sequence[Tensor], name: str, *, expected: int, pads: bool = True) -> Tensor:
    first = tensors[0]
    if len(tensors) != expected:
        raise UserCodeError(f"The data set's {name} are a tensor in some samples only: return the same for every one.")
    if all(leaf.shape == first.shape and leaf.dtype == first.dtype for leaf in tensors):
        return torch.stack(list(tensors))
    for leaf in tensors:
        if leaf.dtype != first.dtype or leaf.ndim != first.ndim or leaf.shape[1:] != first.shape[1:]:
            raise UserCodeError(
                f"The data set's {name} are {first.dtype} {tuple(first.shape)} in one sample and {leaf.dtype} "
                f"{tuple(leaf.shape)} in another: only the length of the first dim may differ."
            )
    if not pads:
        other = next(leaf for leaf in tensors if leaf.shape != first.shape)
        raise UserCodeError(
            f"The data set's {name} are of shape {tuple(first.shape)} in one sample, {tuple(other.shape)} in another, "
            "which no DataLoader puts side by side by itself: hand over one with a collate_fn that does, as by "
            "torch.nn.utils.rnn.pad_sequence, or pad them in the data set."
        )
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)


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
    if len(targets) == 1:
        return None
    lengths = [[len(leaf) if leaf.ndim else 1 for leaf in leaves(tree)] for tree in targets]
    if all(of_sample == lengths[0] for of_sample in lengths):
        return None
    if isinstance(targets[0], Tensor):
        return torch.tensor(lengths).flatten()
    if weighted:
        return None
    raise UserCodeError(
        "The targets are several tensors of different lengths, so padding would count: return weights with each sample."
    )
