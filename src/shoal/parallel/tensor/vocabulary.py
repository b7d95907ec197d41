"""Logits of which each rank has the columns of its part of the vocabulary, and their cross-entropy.

    loss = log(sum_v exp(logit_v - max)) + max - logit_target

The maximum takes one reduction of a number a token, the sum and the target's logit together another. The gradient,
softmax - one-hot, is this rank's columns of the whole one and needs no wire (arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.parallel.tensor.layers import uneven_cut
from shoal.parallel.tensor.operators import linear_map


@dataclass(frozen=True)
class VocabularySplit:
    """This rank has the logits of the tokens `offset` .. `offset + length` of `total`."""

    offset: int
    length: int
    total: int


def gather_logits(logits: Tensor, split: VocabularySplit, group: Collective) -> Tensor:
    """This rank's logits `[..., length]` to all `[..., total]`, for losses that need them and for evaluation.

    What follows is done alike on every rank, so the gradient of a rank's part is its slice of the whole gradient.
    """
    columns = partial(_own_columns, split=split)
    return linear_map(logits, partial(_all_columns, split=split, group=group), adjoint=columns)


def _all_columns(logits: Tensor, split: VocabularySplit, group: Collective) -> Tensor:
    lengths = [uneven_cut(split.total, place, group.size).length for place in range(group.size)]
    padded = F.pad(logits, (0, lengths[0] - split.length)).contiguous()  # the first part is the longest
    everybody = padded.new_empty(group.size, *padded.shape)
    group.all_gather(everybody.flatten(0, 1), padded).wait()
    return torch.cat([part[..., :length] for part, length in zip(everybody, lengths, strict=True)], dim=-1)


def _own_columns(logits: Tensor, split: VocabularySplit) -> Tensor:
    return logits.narrow(-1, split.offset, split.length)


IGNORED = -100
"""A target that is left out: its loss and its gradient are 0."""


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, *, split: VocabularySplit, group: Collective) -> Tensor:
    """This rank's logits `[..., length]` and int64 targets `[...]` to losses `[...]`, in float32 at least.

    The same targets and losses on every rank. Raises `UserCodeError` for a target outside of the vocabulary.
    """
    if logits.shape != (*targets.shape, split.length) or targets.dtype != torch.int64:
        raise UserCodeError(
            f"the model returned {tuple(logits.shape)} for targets {tuple(targets.shape)} of {targets.dtype}; split "
            f"cross-entropy needs logits [*targets, {split.length}] and targets of torch.int64"
        )
    return _CrossEntropy.apply(logits, targets, split, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, split: VocabularySplit, group: Collective) -> Tensor:
        wide = _wide(logits)
        largest = wide.amax(-1) if split.length else wide.new_full(targets.shape, -torch.inf)
        group.all_reduce(largest, "max").wait()
        wide = wide - largest[..., None]
        both = torch.stack([wide.exp().sum(-1), _target_logits(wide, targets, split)])
        group.all_reduce(both).wait()
        log_sum = both[0].log()
        ctx.save_for_backward(logits, targets, largest, log_sum)
        ctx.split = split
        return (log_sum - both[1]).masked_fill(targets == IGNORED, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets, largest, log_sum = ctx.saved_tensors
        scale = grads[0].masked_fill(targets == IGNORED, 0)[..., None]
        # Not logits - (largest + log_sum): that sum is rounded to the precision of large logits.
        grad = (_wide(logits) - largest[..., None]).sub_(log_sum[..., None]).exp_().mul_(scale)
        if ctx.split.length:
            elsewhere = _elsewhere(targets, ctx.split)
            column = (targets - ctx.split.offset).masked_fill(elsewhere, 0)
            grad.scatter_add_(-1, column[..., None], -scale.masked_fill(elsewhere[..., None], 0))
        return grad.to(logits.dtype), None, None, None


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _elsewhere(targets: Tensor, split: VocabularySplit) -> Tensor:
    """Which targets are tokens of other ranks, or left out. One that is no token at all is not elsewhere either."""
    end = split.offset + split.length
    others = ((targets >= 0) & (targets < split.offset)) | ((targets >= end) & (targets < split.total))
    return others | (targets == IGNORED)


def _target_logits(logits: Tensor, targets: Tensor, split: VocabularySplit) -> Tensor:
    """The logit of each target on the rank that has it, 0 on the others."""
    elsewhere = _elsewhere(targets, split)
    if split.length == 0:
        return logits.new_zeros(targets.shape)
    column = (targets - split.offset).masked_fill(elsewhere, 0)
    try:
        own = logits.gather(-1, column[..., None])[..., 0]
    except RuntimeError:
        raise UserCodeError(
            f"targets lie between {int(targets.min())} and {int(targets.max())}, and the vocabulary has {split.total} "
            f"tokens; targets must lie between 0 and {split.total - 1} ({IGNORED} is left out)"
        ) from None
    return own.masked_fill(elsewhere, 0)
