"""Cast: every number in fewer bits, rounded to nearest.

bfloat16 has the range of float32 and is sent as it is. float16 and float8 (Micikevicius et al., "FP8 Formats for Deep
Learning", arXiv:2209.05433) have little range, so a block of numbers shares a scale that takes its largest to the
format's largest:

    s = max |x_i| / largest,   sent: s in float32, round(x_i / s)

Not linear: sums of 16-bit numbers would round again at every hop. Decoded, summed in float32 and encoded once more, the
same bytes carry one rounding more, however many ranks there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks, per_scale, times_scale
from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import CastConfig
from shoal.codec.kernels import kernels_for

_SCALED = {"float16": torch.float16, "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


class Cast(Codec):
    """`CastConfig`, on the wire."""

    shows_nonfinite = True

    def __init__(self, config: CastConfig) -> None:
        self._block = config.block
        self._scaled = _SCALED.get(config.dtype)

    def fields(self, numel: int) -> tuple[Field, ...]:
        if self._scaled is None:
            return (Field(torch.bfloat16, numel),)
        scales, numbers = Field(torch.float32, block_count(numel, self._block)), Field(self._scaled, numel)
        return scales, numbers

    def _encode(self, x: Tensor, key: int) -> Payload:
        kernels = kernels_for(x)
        if kernels is None:
            return self.encode_in_torch(x)
        if self._scaled is None:
            narrow = torch.empty(x.numel(), dtype=torch.bfloat16)
            kernels.to_bfloat16(x, narrow)
            return (narrow,)
        scales, numbers = (torch.empty(field.numel, dtype=field.dtype) for field in self.fields(x.numel()))
        kernels.narrow(x, scales, numbers, block=self._block)
        return scales, numbers

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        result = torch.empty(numel, dtype=dtype, device=payload[0].device)
        kernels = kernels_for(result)
        if kernels is None:
            return self.decode_in_torch(payload, numel, dtype)
        if self._scaled is None:
            kernels.from_bfloat16(payload[0], result)
        else:
            scales, numbers = payload
            kernels.widen(scales, numbers, result, block=self._block)
        return result

    def encode_in_torch(self, x: Tensor) -> Payload:
        """The payload of `x` `[numel]` float32 or float64 on any device."""
        if self._scaled is None:
            return (x.to(torch.bfloat16),)
        rows, largest = in_blocks(x, self._block), torch.finfo(self._scaled).max
        scales = (rows.abs().amax(1) / largest).float()
        scaled = per_scale(rows, scales).clamp_(-largest, largest)
        return scales, scaled.to(self._scaled).view(-1)[: x.numel()]

    def decode_in_torch(self, payload: Payload, numel: int, dtype: torch.dtype) -> Tensor:
        """The vector `[numel]` on any device."""
        if self._scaled is None:
            return payload[0].to(dtype)
        scales, numbers = payload
        return times_scale(in_blocks(numbers.to(dtype), self._block), scales, numel, dtype)
