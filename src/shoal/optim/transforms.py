"""Gradient transforms that read numbers: each changes the gradients of this rank's parts in place, as one process would
those of whole parameters.

    clip_value        g_i <- max(-limit, min(limit, g_i))
    clip_layer        g <- g min(1, limit / |g|)                            of each parameter
    clip_adaptively   g <- g min(1, limit max(|x|, least) / |g|)            of each row             arXiv:2102.06171
    centralise        g <- g - mean(g)                                      of each row of a matrix arXiv:2004.01461
    add_noise         g <- g + N(0, std^2 / t^decay)                        in step t               arXiv:1511.06807

A new one is a function here and a table in `declared.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from shoal.comm.collective import exchanged
from shoal.config.check import implementation_of
from shoal.maths.counter import indices, key_of, normal
from shoal.optim.declared import AddNoise, Centralise, ClipAdaptively, ClipLayer, ClipValue, Dims, TransformConfig
from shoal.optim.parts import Parts
from shoal.state import Owned, Region, is_counted

# Sums over the rows of whole parameters, of which ranks have parts: one all-reduce for all rows of all parameters.
#
# A row is what its first index leaves free: the weights of one output. A vector or a number is one row. A part may
# begin and end within a row.


class RowSums:
    """Sums for the parameters of `parts.owned`, in its order. All ranks of the replica make it and call it together."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        own = {o.name: rows_of(o.holding.global_shape) for o in parts.owned}
        every = {name: rows for one in exchanged(own, parts.replica, parts.device) for name, rows in one.items()}
        self._starts: dict[str, int] = {}
        self._length = 0
        for name in sorted(every):
            self._starts[name] = self._length
            self._length += every[name]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`tensors` have this rank's part of each; the sums of the rows of the whole ones, float64 `[rows]`."""
        table = torch.zeros(self._length, dtype=torch.float64, device=self._parts.device)
        for own, tensor in zip(self._parts.owned, tensors, strict=True):
            start = self._starts[own.name]
            for (first, last), part in row_parts(own, tensor) if is_counted(own) else ():
                table[start + first : start + last] += part.double().sum(1)
        self._parts.replica.all_reduce(table).wait()
        found = []
        for own in self._parts.owned:
            start = self._starts[own.name]
            found.append(table[start : start + rows_of(own.holding.global_shape)])
        return found


def rows_of(shape: Dims) -> int:
    """Rows of a parameter of this shape."""
    return shape[0] if len(shape) > 1 else 1


def row_length(shape: Dims) -> int:
    """Numbers in each of them."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)


def row_parts(own: Owned, tensor: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """What of which rows lies in `tensor`, which has the numbers of `own`: ((first, last), view `[rows, n]`)."""
    flat = tensor.view(-1)
    for region in own.regions:
        rows = _rows(region, own.holding.global_shape)
        part = flat[region.start : region.start + region.box.numel]
        yield rows, part.view(rows[1] - rows[0], -1)


def _rows(region: Region, shape: Dims) -> tuple[int, int]:
    if len(shape) < 2:
        return (0, 1)
    return region.box.offset[0], region.box.offset[0] + region.box.shape[0]


class Chain:
    """The transforms of a run file, in their order, over what this rank's optimizer steps."""

    def __init__(self, transforms: Sequence[TransformConfig], parts: Parts, seed: int) -> None:
        self.parts, self.rows, self.seed = parts, RowSums(parts), seed
        self._transforms = transforms

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """Changes every `.grad` as step `step`, from 1, asks. All ranks of the replica call it together. What has none,
        as it is frozen, counts as zeros and goes on to have none.
        """
        gradients = [own.gradient if own.parameter.grad is None else own.parameter.grad for own in self.parts.owned]
        for transform in self._transforms:
            change: Callable[[TransformConfig, Chain, list[Tensor], int], None] = implementation_of(transform)
            change(transform, self, gradients, step)


def clip_value(config: ClipValue, chain: Chain, gradients: list[Tensor], step: int) -> None:
    """No number is larger than the limit."""
    for gradient in gradients:
        gradient.clamp_(-config.limit, config.limit)


def clip_layer(config: ClipLayer, chain: Chain, gradients: list[Tensor], step: int) -> None:
    """No parameter's gradient is larger than the limit."""
    squares = chain.rows([gradient.double().square() for gradient in gradients])
    for gradient, rows in zip(gradients, squares, strict=True):
        norm = math.sqrt(float(rows.sum()))
        if norm > config.limit:
            gradient.mul_(config.limit / norm)


def clip_adaptively(config: ClipAdaptively, chain: Chain, gradients: list[Tensor], step: int) -> None:
    """No row's gradient is larger than the limit times the row."""
    lengths = chain.rows([gradient.double().square() for gradient in gradients])
    sizes = chain.rows([own.parameter.detach().double().square() for own in chain.parts.owned])
    for own, gradient, length, size in zip(chain.parts.owned, gradients, lengths, sizes, strict=True):
        most = size.sqrt().clamp_(min=config.least).mul_(config.limit)
        factors = (most / length.sqrt().clamp_(min=torch.finfo(torch.float64).tiny)).clamp_(max=1.0)
        for (first, last), part in row_parts(own, gradient):
            part.mul_(factors[first:last, None].to(part.dtype))


def centralise(config: Centralise, chain: Chain, gradients: list[Tensor], step: int) -> None:
    """The mean of each row of a matrix is taken from it."""
    for own, gradient, total in zip(chain.parts.owned, gradients, chain.rows(gradients), strict=True):
        if len(own.holding.global_shape) > 1:
            mean = total / row_length(own.holding.global_shape)
            for (first, last), part in row_parts(own, gradient):
                part.sub_(mean[first:last, None].to(part.dtype))


def add_noise(config: AddNoise, chain: Chain, gradients: list[Tensor], step: int) -> None:
    """Numbers that follow from the seed, the step and the place in the whole parameter."""
    std = config.std / step ** (config.decay / 2)
    for own, gradient in zip(chain.parts.owned, gradients, strict=True):
        key = key_of(chain.seed, "gradient noise", own.name, step)
        flat = gradient.view(-1)
        for region in own.regions:
            counters = indices(own.holding.global_shape, region.box.offset, region.box.shape, device=flat.device)
            noise = normal(key, counters, dtype=flat.dtype).view(-1)
            flat[region.start : region.start + region.box.numel].add_(noise, alpha=std)
