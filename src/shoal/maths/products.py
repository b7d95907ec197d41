"""Products of matrices in float32 on a CPU, by the library that is fastest there; everything else is torch's own.

torch multiplies by MKL, which has no AVX-512 on AMD's processors and takes twice as long there (2.1 times on an EPYC of
2024) as oneDNN, which torch has too. oneDNN in turn takes a thousand times as long for a matrix with gaps between its
rows, which is therefore copied first.

    product             a @ b of matrices, or of stacks of them
    symmetric_product   a @ b.mT where that is symmetric: half of it is computed, and mirrored
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_SIDE = 64
"""Products with a shorter side take less time than the choice between libraries."""
_BLOCK = 128
"""Rows that are multiplied together, at least, where half of a product is left out."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of `[..., rows, inner]` and `[..., inner, columns]`."""
    if not _fits_onednn(a, b) or not a.numel():
        return a @ b
    if a.ndim > 2:
        pairs = zip(a.flatten(0, -3), b.flatten(0, -3), strict=True)
        return torch.stack([product(*pair) for pair in pairs]).view(*a.shape[:-1], b.shape[-1])
    return torch.ops.mkldnn._linear_pointwise(dense(a), dense(b).mT, None, "none", [], "")


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.mT where it is symmetric, as a @ a.mT is, and a product of powers of one symmetric matrix. On a CPU the
    lower half of a large one is computed, by blocks of rows, and mirrored.
    """
    length = a.shape[0]
    if a.ndim > 2 or a.device.type != "cpu" or length < 4 * _BLOCK:
        return product(a, b.mT)
    a, b = a.contiguous(), b.contiguous()  # blocks of rows are then without gaps
    found, block = a.new_empty(length, length), max(_BLOCK, length // 8)
    for start in range(0, length, block):
        rows = product(a[start : start + block], b[: start + block].mT)
        found[start : start + block, : start + block] = rows
        found[:start, start : start + block] = rows[:, :start].mT
    return found


def dense(x: Tensor) -> Tensor:
    """The matrix by rows or by columns, without gaps: itself, or a copy."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()


def _fits_onednn(a: Tensor, b: Tensor) -> bool:
    floats = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    sides = (*a.shape[-2:], b.shape[-1])
    fits = floats and a.shape[:-2] == b.shape[:-2] and min(sides) >= _LEAST_SIDE
    return fits and torch.backends.mkldnn.is_available()
