"""Logits of which each rank of a group has the columns of its part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective
from shoal.parallel.tensor.cut import uneven_cut


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
    return _Gather.apply(logits, split, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, split: VocabularySplit, group: Collective) -> Tensor:
        ctx.split = split
        lengths = [uneven_cut(split.total, place, group.size).length for place in range(group.size)]
        padded = F.pad(logits, (0, lengths[0] - split.length)).contiguous()  # the first part is the longest
        everybody = padded.new_empty(group.size, *padded.shape)
        group.all_gather(everybody.flatten(0, 1), padded).wait()
        return torch.cat([part[..., :length] for part, length in zip(everybody, lengths, strict=True)], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0].narrow(-1, ctx.split.offset, ctx.split.length), None, None
