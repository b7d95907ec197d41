"""Blocks: numbers that share a scale. One large number then spoils the resolution of its own block alone."""

from __future__ import annotations

import torch
from torch import Tensor


def block_count(numel: int, block: int) -> int:
    """Blocks of at most `block` elements that hold `numel`."""
    return -(-numel // block)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """`x` `[numel]` as `[blocks, block]`, filled up with zeros; a view where nothing has to be filled."""
    rest = -x.numel() % block
    return (torch.nn.functional.pad(x, (0, rest)) if rest else x).view(-1, block)


def lengths_of(numel: int, block: int, like: Tensor) -> Tensor:
    """Elements in each block: `[blocks]` in the dtype of `like`, all `block` but perhaps the last."""
    count = block_count(numel, block)
    lengths = torch.full((count,), float(block), dtype=like.dtype, device=like.device)
    if count:
        lengths[-1] = numel - block * (count - 1)
    return lengths


def per_scale(rows: Tensor, scales: Tensor) -> Tensor:
    """`rows` `[blocks, block]` divided by `scales` `[blocks]`; a block whose scale is zero stays as it is.

    Scales are those that are sent, in float32: both sides then compute with the same.
    """
    divisor = torch.where(scales == 0, 1.0, scales).to(rows.dtype)
    return rows / divisor[:, None]


def times_scale(rows: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The vector `[numel]` of `rows` `[blocks, block]` times `scales` `[blocks]`, in `dtype`."""
    return (rows.to(dtype) * scales.to(dtype)[:, None]).view(-1)[:numel]
