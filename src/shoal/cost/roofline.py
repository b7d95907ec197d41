"""Seconds of an operator on a device: the slower of its arithmetic and its memory traffic (Williams et al. 2009).

A matrix multiply [m, k] x [k, n] is cut into tiles, which run in waves on the device's units: T tiles on U units take
ceil(T/U) waves, so that a last wave that is half empty costs as much as a full one. One tile does 2 x rows x columns x
(k + PROLOGUE) operations at its unit's share of the rate; smaller tiles re-use less of what they load and run at the
stated share of it. The best of five tile shapes is taken. That is the one curve of matrix-multiply efficiency here: at
large shapes it tends to the device's `matmul_efficiency`.

Source of the wave model: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

TILES = ((2, 1, 1.0), (1, 2, 1.0), (1, 1, 0.92), (1, 0.5, 0.75), (0.5, 0.5, 0.5))
"""Rows and columns in edges of the device's tile (128 on a GPU), share of the best rate; assumed, from the bytes that
each tile loads for an operation: 1, 1, 1.33, 2 and 2.67 times those of the largest."""

PROLOGUE = 1.6
"""Inner length, in edges, that filling and draining one tile costs: 200 on a GPU; assumed, a few loads deep."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device reaches: matrix multiply FLOP/s, memory bytes/s, units, seconds that a kernel takes at least."""

    matmul_flops_s: float
    memory_bytes_s: float
    units: int
    kernel_s: float
    tile: int = 128
    flash_share: float = 0.75


@dataclass(frozen=True)
class Matmul:
    """`batch` products of [rows, inner] and [inner, columns]."""

    rows: int
    columns: int
    inner: int
    batch: int = 1

    @property
    def flops(self) -> float:
        """Operations, a multiply-add counted as two."""
        return 2.0 * self.batch * self.rows * self.columns * self.inner

    @property
    def numbers(self) -> float:
        """Numbers that are read and written once."""
        return float(self.batch) * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)

    def input_gradient(self) -> Matmul:
        """The product that gives the gradient of the first factor."""
        return Matmul(self.rows, self.inner, self.columns, self.batch)

    def weight_gradient(self) -> Matmul:
        """The product that gives the gradient of the second factor."""
        return Matmul(self.inner, self.columns, self.rows, self.batch)


def matmul_s(product: Matmul, rates: Rates, *, element_bytes: float) -> float:
    """Seconds of one (batched) matrix multiply."""
    arithmetic = _waves_s(product.rows, product.columns, product.inner, product.batch, rates.units, rates.tile)
    traffic = product.numbers * element_bytes / rates.memory_bytes_s
    return max(arithmetic / rates.matmul_flops_s, traffic, rates.kernel_s)


def pass_s(size: float, rates: Rates) -> float:
    """Seconds of an element-wise kernel that moves `size` bytes."""
    return size / rates.memory_bytes_s + rates.kernel_s


@functools.lru_cache(maxsize=1 << 16)
def _waves_s(rows: int, columns: int, inner: int, batch: int, units: int, edge: int) -> float:
    """Operations of all waves, the empty places of the last one included, at the whole device's rate."""
    best = math.inf
    for tall, wide, share in TILES:
        height, width = tall * edge, wide * edge
        tiles = math.ceil(rows / height) * math.ceil(columns / width) * batch
        waves = math.ceil(tiles / units)
        best = min(best, waves * units * 2.0 * height * width * (inner + PROLOGUE * edge) / share)
    return best
