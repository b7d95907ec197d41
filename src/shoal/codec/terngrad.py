"""TernGrad: -1, 0 or 1 for every number, and one scale a block; 1.6 bits a number.

    y_i = s sign(x_i) b_i,   b_i = 1 with probability |x_i| / s,   s = max |x_i| over the block

(Wen et al., "TernGrad: Ternary Gradients to Reduce Communication", arXiv:1705.07878, equations 1 to 3.) Unbiased. The
paper first clips to 2.5 standard deviations, which is not unbiased; small blocks keep s near the numbers instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks, per_scale, times_scale
from shoal.codec.blockwise import round_at_random
from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import TernGradConfig
from shoal.codec.digits import pack_digits, packed_bytes, unpack_digits


class TernGrad(Codec):
    """`TernGradConfig`, on the wire."""

    unbiased = True

    def __init__(self, config: TernGradConfig) -> None:
        self._block = config.block

    def fields(self, numel: int) -> tuple[Field, ...]:
        return (
            Field(torch.float32, block_count(numel, self._block)),
            Field(torch.uint8, packed_bytes(numel, 3)),
        )

    def _encode(self, x: Tensor, key: int) -> Payload:
        rows = in_blocks(x, self._block)
        scales = rows.abs().amax(1).float()
        ternary = round_at_random(per_scale(rows, scales), key).nan_to_num_(0.0).clamp_(-1, 1)
        digits = ternary.view(-1)[: x.numel()].add_(1).to(torch.uint8)
        return scales, pack_digits(digits, 3)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        scales, packed = payload
        ternary = unpack_digits(packed, numel, 3).to(torch.int8) - 1
        return times_scale(in_blocks(ternary, self._block), scales, numel, dtype)
