"""What happens to activations `[batch, seq, ...]` where a model goes from whole to split layers and back.

Two matrix products with an elementwise function between them need one sum if the first matrix is split by columns and
the second by rows (arXiv:1909.08053); the residual stream between such pairs is either whole on every rank or split
along the sequence (arXiv:2205.05198). Each operator is a linear map between such states, its backward the adjoint:

    operator          forward            backward           the stream outside
    enter             the same           sum                whole
    leave             sum                the same           whole
    enter_sequence    gather             sum and scatter    split along the sequence
    leave_sequence    sum and scatter    gather             split along the sequence

The sequence is dimension 1, and the size of the group must divide it. Floating types of any width; sums are in the
type of the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.errors import LayoutError
from shoal.topology.refusal import nearest_multiples

Map = Callable[[Tensor], Tensor]


def enter(x: Tensor, group: Collective) -> Tensor:
    """Whole activations, before layers of which each rank has a part: the gradient is the sum of the ranks' terms."""
    return linear_map(x, _same, adjoint=partial(summed, group=group))


def leave(x: Tensor, group: Collective) -> Tensor:
    """The sum of the ranks' terms, whole on each."""
    return linear_map(x, partial(summed, group=group), adjoint=_same)


def enter_sequence(x: Tensor, group: Collective) -> Tensor:
    """This rank's slice `[batch, seq / size, width]` to the whole sequence, before layers of which each has a part.

    Raises `LayoutError` for a matrix, in which samples and tokens are one dimension and features would be gathered.
    """
    if x.ndim == 2:
        raise LayoutError(
            f"layout.sequence_parallel = true: split layers were called with {tuple(x.shape)}, where they expect "
            "[samples, tokens, width]: the model flattens samples and tokens before them; set it to false"
        )
    return linear_map(x, partial(gathered, group=group), adjoint=partial(scattered, group=group))


def leave_sequence(x: Tensor, group: Collective) -> Tensor:
    """This rank's slice `[batch, seq / size, ...]` of the sum of the ranks' terms. Raises `LayoutError`: `slice_of`."""
    return linear_map(x, partial(scattered, group=group), adjoint=partial(gathered, group=group))


def linear_map(x: Tensor, there: Map, *, adjoint: Map) -> Tensor:
    """`there(x)`, where the gradient of `x` is `adjoint` of the output's: a linear map itself, whose own gradient, as a
    penalty on gradients asks for it, is `there` again.
    """
    return _Linear.apply(x, there, adjoint)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, adjoint: Map) -> Tensor:
        ctx.there, ctx.adjoint = there, adjoint
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return linear_map(grads[0], ctx.adjoint, adjoint=ctx.there), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def summed(x: Tensor, group: Collective) -> Tensor:
    """The sum over the ranks, in a tensor of its own."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total


def gathered(x: Tensor, group: Collective) -> Tensor:
    """Slices along dimension 1, joined in rank order."""
    stacked = x.new_empty(group.size, *x.shape)
    group.all_gather(stacked.view(-1, *x.shape[1:]), x.contiguous()).wait()
    return stacked.transpose(0, 1).flatten(1, 2)  # no copy for a batch of one


def scattered(x: Tensor, group: Collective) -> Tensor:
    """This rank's slice along dimension 1 of the sum over the ranks."""
    slices = _slices(x, group.size).transpose(0, 1).contiguous()
    total = torch.empty_like(slices[0])
    group.reduce_scatter(total, slices.flatten(0, 1)).wait()
    return total


def slice_of(x: Tensor, group: Collective) -> Tensor:
    """This rank's slice along dimension 1. Raises `LayoutError` where the group's size does not divide it."""
    return _slices(x, group.size)[:, group.rank].contiguous()


def _slices(x: Tensor, size: int) -> Tensor:
    """`[batch, seq, ...]` to `[batch, size, seq / size, ...]`."""
    if x.ndim < 2 or x.shape[1] % size:
        check_sequence(x.shape[1] if x.ndim > 1 else 1, size)
    return x.unflatten(1, (size, -1))


def check_sequence(length: int, size: int) -> None:
    """Raises `LayoutError` unless sequence parallelism can split a sequence of `length` tokens over `size` ranks."""
    if length % size:
        nearest = " or ".join(map(str, nearest_multiples(size, length)))
        raise LayoutError(
            f"a sequence of {length} tokens cannot be split evenly over tensor={size} ranks, as sequence parallelism "
            f"does; nearest: {nearest} tokens"
        )
