"""Blockwise integers: a block shares one scale, and every number becomes an integer of 8 or 4 bits.

    s = max |x_i| / L,   q_i = round(x_i / s),   y_i = s q_i,      L = 127 or 7

(Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, section 2.1, with linear levels.) To
nearest: |x - y| <= s / 2. Stochastic: up with the probability of the fraction that is cut off, so that E[y] = x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks, per_scale, times_scale
from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import BlockwiseConfig
from shoal.codec.digits import pack_digits, packed_bytes, unpack_digits
from shoal.maths.counter import uniform


class Blockwise(Codec):
    """`BlockwiseConfig`, on the wire."""

    def __init__(self, config: BlockwiseConfig) -> None:
        self._bits, self._block = config.bits, config.block
        self._levels = config.levels
        self.unbiased = config.rounding == "stochastic"

    def fields(self, numel: int) -> tuple[Field, ...]:
        return (Field(torch.float32, block_count(numel, self._block)), integer_field(numel, self._bits))

    def _encode(self, x: Tensor, key: int) -> Payload:
        rows = in_blocks(x, self._block)
        scales = (rows.abs().amax(1) / self._levels).float()
        scaled = per_scale(rows, scales)
        integers = round_at_random(scaled, key) if self.unbiased else scaled.round_()
        return scales, pack_integers(integers, x.numel(), self._bits, self._levels)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        scales, packed = payload
        integers = unpack_integers(packed, numel, self._bits, self._levels)
        return times_scale(in_blocks(integers, self._block), scales, numel, dtype)


def round_at_random(x: Tensor, key: int) -> Tensor:
    """Integers `[...]` in the dtype of `x`: floor(x + u), u uniform in (0, 1), so that the expectation is `x`."""
    places = torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape)
    return (x + uniform(key, places, dtype=x.dtype)).floor_()


def integer_field(numel: int, bits: int) -> Field:
    """The tensor that `pack_integers` makes: int8, or uint8 of two numbers each."""
    return Field(torch.int8, numel) if bits == 8 else Field(torch.uint8, packed_bytes(numel, 16))


def pack_integers(integers: Tensor, numel: int, bits: int, levels: int) -> Tensor:
    """Whole numbers of -levels .. levels (NaN becomes any of them), the first `numel` of them, in 8 or 4 bits."""
    limited = integers.nan_to_num_(0.0).clamp_(-levels, levels).view(-1)[:numel].to(torch.int8)
    return limited if bits == 8 else pack_digits((limited + levels).to(torch.uint8), 16)


def unpack_integers(packed: Tensor, numel: int, bits: int, levels: int) -> Tensor:
    """int8 `[numel]`, the inverse of `pack_integers`."""
    return packed if bits == 8 else unpack_digits(packed, numel, 16).to(torch.int8) - levels
