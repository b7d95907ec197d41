"""Seconds of one kernel on one device: a matrix product, a product in float8, a pass over memory.

An operator takes the slower of its arithmetic and its memory traffic (the roofline, Williams et al. 2009). A matrix
multiply [m, k] x [k, n] is cut into tiles, which run in waves on the device's units: T tiles on U units take
ceil(T/U) waves, so that a last wave that is half empty costs as much as a full one. One tile does 2 x rows x columns x
(k + PROLOGUE) operations at its unit's share of the rate; smaller tiles re-use less of what they load and run at the
stated share of it. The best of five tile shapes is taken. That is the one curve of matrix-multiply efficiency here: at
large shapes it tends to the device's `matmul_efficiency`.

Source of the wave model: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation).

A linear layer in float8 multiplies numbers of one byte at the device's float8 rate. Each factor of a product is scaled
by its largest magnitude: a pass that finds it (e bytes a number read) and one that casts (e read, 1 written).

    torchao             forward: input and weight; backward: those again, and the output's gradient; input and gradient
                        once more in the other order, which the weight's product needs (1 read, 1 written)
    transformer-engine  input and gradient once, cast to both orders at the same time (1 more written); weights once a
                        step, which is not counted

Counted in torchao's `Float8Linear` and in Transformer Engine's current scaling.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from shoal.cost.attention import Kernel, attention_share
from shoal.topology.cluster import Architecture

TILES = ((2, 1, 1.0), (1, 2, 1.0), (1, 1, 0.92), (1, 0.5, 0.75), (0.5, 0.5, 0.5))
"""Rows and columns in edges of the device's tile (128 on a GPU), share of the best rate; assumed, from the bytes that
each tile loads for an operation: 1, 1, 1.33, 2 and 2.67 times those of the largest."""

PROLOGUE = 1.6
"""Inner length, in edges, that filling and draining one tile costs: 200 on a GPU; assumed, a few loads deep."""


Float8Casts = Literal["torchao", "transformer-engine"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device reaches: matrix multiply FLOP/s, memory bytes/s, units, seconds that a kernel takes at least.

    `peak_flops_s` is the rate of which published attention kernels are shares; `float8_flops_s` that of matrix products
    in float8, None where no stack asks for them.
    """

    matmul_flops_s: float
    peak_flops_s: float
    memory_bytes_s: float
    units: int
    kernel_s: float
    tile: int = 128
    architecture: Architecture = "ampere"
    attention: Kernel = "best"
    float8_flops_s: float | None = None

    def attention_flops_s(self, *, head_size: float, tokens: float, backward: bool) -> float:
        """FLOP/s of fused causal attention over `tokens` tokens."""
        share = attention_share(
            self.architecture, self.attention, head_size=head_size, tokens=tokens, backward=backward
        )
        return self.peak_flops_s * share


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


def float8_s(product: Matmul, rates: Rates) -> float:
    """Seconds of one (batched) product of float8 numbers, its result in two bytes. Casts come on top."""
    if rates.float8_flops_s is None:
        raise ValueError("these rates have none for float8: give the device's")
    arithmetic = _waves_s(product.rows, product.columns, product.inner, product.batch, rates.units, rates.tile)
    results = float(product.batch) * product.rows * product.columns
    traffic = (product.numbers + results) / rates.memory_bytes_s
    return max(arithmetic / rates.float8_flops_s, traffic, rates.kernel_s)


def float8_casts_s(
    product: Matmul, rates: Rates, *, element_bytes: float, casts: Float8Casts = "torchao"
) -> tuple[float, float]:
    """(forward, backward) seconds of scaling and casting the factors of a linear layer's three products."""
    batch = float(product.batch)
    given, weight = batch * product.rows * product.inner, batch * product.inner * product.columns
    gradient = batch * product.rows * product.columns
    each = 2 * element_bytes + 1
    if casts == "transformer-engine":
        return pass_s((each + 1) * given, rates), pass_s((each + 1) * gradient, rates)
    turned = pass_s(2 * given, rates) + pass_s(2 * gradient, rates)
    forward = pass_s(each * given, rates) + pass_s(each * weight, rates)
    return forward, forward + pass_s(each * gradient, rates) + turned


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
