"""One bit: the sign of every number, and one scale a block.

    y_i = s sign(x_i),   s = mean |x_i| over the block

(Seide et al., Interspeech 2014; the scale of Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv:1901.09847,
algorithm 1.) The scale makes y the closest vector of the form c sign(x), and leaves |x - y|^2 = |x|^2 - |x|_1^2 / d
in a block of d numbers. Biased: it needs error feedback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks, lengths_of, times_scale
from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import SignConfig
from shoal.codec.digits import pack_digits, packed_bytes, unpack_digits


class Sign(Codec):
    """`SignConfig`, on the wire. Zero counts as positive."""

    def __init__(self, config: SignConfig) -> None:
        self._block = config.block

    def fields(self, numel: int) -> tuple[Field, ...]:
        return (
            Field(torch.float32, block_count(numel, self._block)),
            Field(torch.uint8, packed_bytes(numel, 2)),
        )

    def _encode(self, x: Tensor, key: int) -> Payload:
        sums = in_blocks(x, self._block).abs().sum(1)
        scales = (sums / lengths_of(x.numel(), self._block, sums)).float()
        return scales, pack_digits((x >= 0).view(torch.uint8), 2)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        scales, packed = payload
        signs = unpack_digits(packed, numel, 2).to(torch.int8).mul_(2).sub_(1)
        return times_scale(in_blocks(signs, self._block), scales, numel, dtype)
