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
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from shoal.topology.cluster import Architecture

# FLOP/s of fused causal attention by kernel, architecture, direction, head size and length.
#
# FlashAttention never writes the square of scores to memory, so its time follows from its arithmetic alone: under a
# causal mask 4 b s^2 a d / 2 operations forward and 2.5 times as many backward (arXiv:2205.14135). The rate depends on
# the length, because short sequences leave blocks half empty, on the head size, and on the direction.
#
#     hopper, flash-2 and flash-3     figures 5 and 6 of arXiv:2407.08608 (H100 SXM5)
#     ampere, flash-2                 figure 4 of arXiv:2307.08691 (A100 SXM4), which gives both directions together;
#                                     they are divided in the proportion of flash-2 on hopper
#     blackwell, flash-4              github.com/Dao-AILab/flash-attention, pull requests 2605 (forward, 1,024 to 4,096)
#                                     and 2280 (backward, 8,192); what they leave out is assumed in their proportions
#     blackwell, flash-2              that of hopper, in FLOP/s: issue 1589 of the same repository
#     triton                          flash-2 over 1.4 forward and over 2 backward: section 4.1 of arXiv:2307.08691
#
# Figure 6 of arXiv:2407.08608 has no causal mask. The causal backward is assumed to lose what the causal forward loses.
# Rates are kept as shares of the device's peak, so that a device without a table of its own takes those of `ampere`.


Kernel = Literal["best", "flash-2", "triton"]
"""`best` is the fastest that is published for the architecture."""

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BACKWARD_FLOPS = 2.5
"""Operations of the backward for one of the forward: five products in the place of two."""

TRITON_FORWARD, TRITON_BACKWARD = 1 / 1.4, 1 / 2.0

_Rates = Mapping[int, tuple[tuple[float, ...], tuple[float, ...]]]
"""Head size -> TFLOP/s forward and backward at each of `LENGTHS`."""


@dataclass(frozen=True, kw_only=True)
class _Table:
    peak_tflops: float
    rates: _Rates


_AMPERE_2 = _Table(
    peak_tflops=312,
    rates={
        64: ((115, 143, 160, 173, 179, 185), (81, 111, 133, 150, 160, 166)),
        128: ((130, 166, 182, 196, 203, 209), (90, 123, 146, 165, 175, 182)),
    },
)
_HOPPER_2 = _Table(
    peak_tflops=989,
    rates={
        64: ((180, 229, 262, 284, 295, 299), (126, 178, 218, 247, 263, 269)),
        128: ((191, 260, 298, 319, 333, 335), (132, 193, 240, 269, 286, 292)),
    },
)
_HOPPER_3 = _Table(
    peak_tflops=989,
    rates={
        64: ((197, 265, 371, 420, 460, 473), (161, 245, 340, 400, 438, 451)),
        128: ((292, 423, 521, 579, 602, 616), (198, 317, 418, 492, 521, 533)),
    },
)
_BLACKWELL_4 = _Table(
    peak_tflops=2500,
    rates={
        64: ((300, 542, 785, 1011, 1169, 1251), (240, 430, 625, 805, 930, 995)),
        128: ((450, 829, 1172, 1431, 1431, 1431), (355, 655, 925, 1118, 1118, 1118)),
    },
)
_TABLES: Mapping[tuple[Architecture, Kernel], _Table] = MappingProxyType(
    {
        ("ampere", "best"): _AMPERE_2,
        ("ampere", "flash-2"): _AMPERE_2,
        ("ampere", "triton"): _AMPERE_2,
        ("hopper", "best"): _HOPPER_3,
        ("hopper", "flash-2"): _HOPPER_2,
        ("hopper", "triton"): _HOPPER_2,
        ("blackwell", "best"): _BLACKWELL_4,
        ("blackwell", "flash-2"): _Table(peak_tflops=2250, rates=_HOPPER_2.rates),
        ("blackwell", "triton"): _Table(peak_tflops=2250, rates=_HOPPER_2.rates),
    }
)


def attention_share(
    architecture: Architecture, kernel: Kernel, *, head_size: float, tokens: float, backward: bool
) -> float:
    """Share of the device's peak rate that causal attention over `tokens` tokens reaches, heads of `head_size`.

    Between lengths and head sizes the rate is linear in the logarithm; beyond the longest it stays what it is there,
    and below the shortest length and the smallest head it falls in proportion.
    """
    table = _TABLES[architecture, kernel]
    sizes = sorted(table.rates)
    rates = [_at_length(table.rates[size][backward], tokens) for size in sizes]
    rate = _between(sizes, rates, head_size)
    slower = (TRITON_BACKWARD if backward else TRITON_FORWARD) if kernel == "triton" else 1.0
    return slower * rate / table.peak_tflops


def _at_length(rates: tuple[float, ...], tokens: float) -> float:
    return _between(LENGTHS, rates, tokens)


def _between(places: tuple[int, ...] | list[int], values: tuple[float, ...] | list[float], wanted: float) -> float:
    if wanted <= places[0]:
        return values[0] * wanted / places[0]
    for low, high, first, second in zip(places, places[1:], values, values[1:], strict=False):
        if wanted <= high:
            share = math.log(wanted / low) / math.log(high / low)
            return first + share * (second - first)
    return values[-1]


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
