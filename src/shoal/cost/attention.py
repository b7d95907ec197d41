"""FLOP/s of fused causal attention by kernel, architecture, direction, head size and length.

FlashAttention never writes the square of scores to memory, so its time follows from its arithmetic alone: under a
causal mask 4 b s^2 a d / 2 operations forward and 2.5 times as many backward (arXiv:2205.14135). The rate depends on
the length, because short sequences leave blocks half empty, on the head size, and on the direction.

    hopper, flash-2 and flash-3     figures 5 and 6 of arXiv:2407.08608 (H100 SXM5)
    ampere, flash-2                 figure 4 of arXiv:2307.08691 (A100 SXM4), which gives both directions together;
                                    they are divided in the proportion of flash-2 on hopper
    blackwell, flash-4              github.com/Dao-AILab/flash-attention, pull requests 2605 (forward, 1,024 to 4,096)
                                    and 2280 (backward, 8,192); what they leave out is assumed in their proportions
    blackwell, flash-2              that of hopper, in FLOP/s: issue 1589 of the same repository
    triton                          flash-2 over 1.4 forward and over 2 backward: section 4.1 of arXiv:2307.08691

Figure 6 of arXiv:2407.08608 has no causal mask. The causal backward is assumed to lose what the causal forward loses.
Rates are kept as shares of the device's peak, so that a device without a table of its own takes those of `ampere`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from shoal.topology.cluster import Architecture

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
