"""Gradient transforms that read numbers: each changes the gradients of this rank's parts in place, as one process would
those of whole parameters.

    clip_value        g_i <- max(-limit, min(limit, g_i))
    clip_layer        g <- g min(1, limit / |g|)                            of each parameter
    clip_adaptively   g <- g min(1, limit max(|x|, least) / |g|)            of each row             arXiv:2102.06171
    centralise        g <- g - mean(g)                                      of each row of a matrix arXiv:2004.01461
    add_noise         g <- g + N(0, std^2 / t^decay)                        in step t               arXiv:1511.06807

A new one is a function here and a table in `transforms_config.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.config.table import implementation_of
from shoal.maths.counter import indices, key_of, normal
from shoal.optim.parts import Parts
from shoal.optim.row_sums import RowSums, row_length, row_parts
from shoal.optim.transforms_config import AddNoise, Centralise, ClipAdaptively, ClipLayer, ClipValue, TransformConfig


class Chain:
    """The transforms of a run file, in their order, over what this rank's optimizer steps."""

    def __init__(self, transforms: Sequence[TransformConfig], parts: Parts, seed: int) -> None:
        self.parts, self.rows, self.seed = parts, RowSums(parts), seed
        self._transforms = transforms

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """Changes every `.grad` as step `step`, from 1, asks. All ranks of the replica call it together."""
        gradients = []
        for own in self.parts.owned:
            if own.parameter.grad is None:
                own.parameter.grad = torch.zeros_like(own.parameter)
            gradients.append(own.parameter.grad)
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
