"""What the loss is averaged over, as a weight for every loss.

A step's loss is sum(losses * weights) / sum(weights), both sums over the whole global batch. With the weights

    tokens    1 at each real target position
    samples   1 for each sample in total: 1 / (its real positions) at each of them where targets are sequences
    weights   the data set's own; one number for a sequence is spread over its real positions

the average does not see padding, accumulation or the number of replicas: a weight depends on its own sample alone. A
*real* position is within the sample's length and, for integer targets, not -100, which PyTorch's cross-entropy ignores.
Targets are *sequences* when they are integers with a dim beyond the samples'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.data.config import Denominator
from shoal.data.sample import Tree, describe
from shoal.errors import UserCodeError

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
