"""Quantisation by blocks: every number of a block becomes one of few whole numbers, which share a scale.

    s = scale of the block       largest: max |x_i| / L      norm: |x|_2 / L      mean: sum |x_i| / d
    q_i = round(x_i / s)         nearest: ties to even       stochastic: floor(x_i / s + u), u uniform in (0, 1)
                                 sign: 1 or -1, and no other
    y_i = s q_i,                 |q_i| <= L

Stochastic rounding makes E[y] = x. One large number spoils the resolution of its own block alone. On the wire: s in
float32, and q in 8 bits (L = 127), 4 bits (L = 7), a fifth of a byte (-1, 0 and 1) or 1 bit (signs). What is not
finite takes its block's scale with it, so that its block decodes to NaN.

`Quantised` is the codec; the codecs that are one choice of scale, rounding and L each say where it comes from:
`blockwise`, `qsgd`, `terngrad` and `sign`. float32 on a CPU is coded in C (`kernels`), all else in torch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks, lengths_of, per_scale, times_scale
from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.digits import pack_digits, packed_bytes, unpack_digits
from shoal.codec.kernels import kernels_for
from shoal.maths.counter import uniform

Scale = Literal["largest", "norm", "mean"]
Rounding = Literal["nearest", "stochastic", "sign"]


class Quantised(Codec):
    """Blocks of `block` numbers, each a whole number of -`levels` to `levels` (127, 7 or 1) times its block's scale."""

    shows_nonfinite = True

    def __init__(self, *, block: int, levels: int, scale: Scale, rounding: Rounding) -> None:
        self._block, self._levels, self._scale, self._rounding = block, levels, scale, rounding
        self._base = 2 if rounding == "sign" else {127: 256, 7: 16, 1: 3}[levels]
        self.unbiased = rounding == "stochastic"

    def fields(self, numel: int) -> tuple[Field, ...]:
        dtype = torch.int8 if self._base == 256 else torch.uint8
        digits = numel if self._base == 256 else packed_bytes(numel, self._base)
        return Field(torch.float32, block_count(numel, self._block)), Field(dtype, digits)

    def _encode(self, x: Tensor, key: int) -> Payload:
        kernels = kernels_for(x)
        if kernels is None:
            return self.encode_in_torch(x, key)
        scales, digits = (torch.empty(field.numel, dtype=field.dtype) for field in self.fields(x.numel()))
        kernels.encode(
            x, scales, digits, block=self._block, scale=self._scale, rounding=self._rounding, levels=self._levels,
            base=self._base, key=key,
        )  # fmt: skip
        return scales, digits

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        scales, digits = payload
        result = torch.empty(numel, dtype=dtype, device=scales.device)
        kernels = kernels_for(result)
        if kernels is None:
            return self.decode_in_torch(payload, numel, dtype)
        kernels.decode(scales, digits, result, block=self._block, levels=self._levels, base=self._base)
        return result

    def encode_in_torch(self, x: Tensor, key: int) -> Payload:
        """The payload of `x` `[numel]` float32 or float64 on any device."""
        rows = in_blocks(x, self._block)
        scales = self._scales(rows, x.numel()).float()
        if self._rounding == "sign":
            return scales, pack_digits((x >= 0).view(torch.uint8), 2)
        scaled = per_scale(rows, scales)
        rounded = round_at_random(scaled, key) if self._rounding == "stochastic" else scaled.round_()
        limited = rounded.nan_to_num_(0.0).clamp_(-self._levels, self._levels).view(-1)[: x.numel()].to(torch.int8)
        return scales, limited if self._base == 256 else pack_digits((limited + self._levels).byte(), self._base)

    def decode_in_torch(self, payload: Payload, numel: int, dtype: torch.dtype) -> Tensor:
        """The vector `[numel]` on any device."""
        scales, digits = payload
        if self._base != 256:
            digits = unpack_digits(digits, numel, self._base).to(torch.int8)
            digits = digits.mul_(2).sub_(1) if self._base == 2 else digits.sub_(self._levels)
        return times_scale(in_blocks(digits, self._block), scales, numel, dtype)

    def _scales(self, rows: Tensor, numel: int) -> Tensor:
        """`[blocks]` of `rows` `[blocks, block]`."""
        if self._scale == "largest":
            return rows.abs().amax(1) / self._levels
        if self._scale == "norm":
            return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) / self._levels
        sums = rows.abs().sum(1, dtype=torch.float64)
        return sums / lengths_of(numel, self._block, sums)


def round_at_random(x: Tensor, key: int) -> Tensor:
    """Whole numbers `[...]` in the dtype of `x`: floor(x + u), u uniform in (0, 1), so that the expectation is `x`."""
    places = torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape)
    return (x + uniform(key, places, dtype=x.dtype)).floor_()
