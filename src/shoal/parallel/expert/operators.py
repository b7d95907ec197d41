"""How tokens get to their experts and back, as autograd functions: each one's backward is its inverse on gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective


def all_to_all(rows: Tensor, group: Collective, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """`rows` `[sum(sent), ...]`: `sent[r]` of them go to rank r, `received[r]` come from it, in rank order."""
    return _AllToAll.apply(rows, group, list(sent), list(received))


def split_tokens(x: Tensor, group: Collective) -> Tensor:
    """This rank's slice of the sequence, of `x` `[batch, seq, width]` that all ranks have; slices may be uneven.

    The gradients of the slices are gathered, so that every rank has the gradient of all of `x`.
    """
    return _Split.apply(x, group)


def join_tokens(x: Tensor, group: Collective, *, seq: int) -> Tensor:
    """The inverse: the slices `[batch, seq', width]` of all ranks as `[batch, seq, width]`, on each."""
    return _Join.apply(x, group, seq)


def bounds(seq: int, group: Collective) -> tuple[int, int]:
    """Where this rank's slice of a sequence begins and ends; slices differ by one at most, the longer ones first."""
    return _start(seq, group.rank, group.size), _start(seq, group.rank + 1, group.size)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Collective, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchanged(rows, group, sent=sent, received=received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(gradients[0], ctx.group, sent=ctx.received, received=ctx.sent), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group, ctx.seq = group, x.shape[1]
        return x.narrow(1, *_start_and_length(x.shape[1], group)).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gathered(gradients[0], ctx.group, ctx.seq), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective, seq: int) -> Tensor:
        ctx.group = group
        return _gathered(x, group, seq)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = gradients[0]
        return whole.narrow(1, *_start_and_length(whole.shape[1], ctx.group)).contiguous(), None, None


def _exchanged(rows: Tensor, group: Collective, *, sent: list[int], received: list[int]) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    group.all_to_all(output, rows.contiguous(), output_sizes=received, input_sizes=sent).wait()
    return output


def _gathered(x: Tensor, group: Collective, seq: int) -> Tensor:
    """The slices of all ranks side by side: padded to one length on the wire, cut to their own behind it."""
    longest = -(-seq // group.size)
    padded = x.new_zeros(x.shape[0], longest, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    everyone = padded.new_empty(group.size * x.shape[0], *padded.shape[1:])
    group.all_gather(everyone, padded).wait()
    starts = [_start(seq, rank, group.size) for rank in range(group.size + 1)]
    slices = everyone.unflatten(0, (group.size, x.shape[0]))
    return torch.cat([slices[r][:, : starts[r + 1] - starts[r]] for r in range(group.size)], dim=1)


def _start(seq: int, rank: int, size: int) -> int:
    each, extra = divmod(seq, size)
    return rank * each + min(rank, extra)


def _start_and_length(seq: int, group: Collective) -> tuple[int, int]:
    start, end = bounds(seq, group)
    return start, end - start
