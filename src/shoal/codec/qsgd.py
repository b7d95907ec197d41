"""QSGD: a block's 2-norm, and for every number a random one of the two levels beside it.

    y_i = |x|_2 sign(x_i) l_i / L,   l_i in {0 .. L} rounded at random from L |x_i| / |x|_2

(Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", arXiv:1610.02132,
equation 3.) Unbiased. In a block of d numbers E|x - y|^2 <= min(d / L^2, sqrt(d) / L) |x|^2 (lemma 3.1). Levels are
sent in 8 or 4 bits, without the paper's Elias code, so that the bytes are known beforehand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks, per_scale, times_scale
from shoal.codec.blockwise import integer_field, pack_integers, round_at_random, unpack_integers
from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import QSGDConfig


class QSGD(Codec):
    """`QSGDConfig`, on the wire."""

    unbiased = True

    def __init__(self, config: QSGDConfig) -> None:
        self._bits, self._block = config.bits, config.block
        self._levels = (1 << (config.bits - 1)) - 1

    def fields(self, numel: int) -> tuple[Field, ...]:
        return (Field(torch.float32, block_count(numel, self._block)), integer_field(numel, self._bits))

    def _encode(self, x: Tensor, key: int) -> Payload:
        rows = in_blocks(x, self._block)
        scales = (torch.linalg.vector_norm(rows, dim=1) / self._levels).float()
        integers = round_at_random(per_scale(rows, scales), key)
        return scales, pack_integers(integers, x.numel(), self._bits, self._levels)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        scales, packed = payload
        integers = unpack_integers(packed, numel, self._bits, self._levels)
        return times_scale(in_blocks(integers, self._block), scales, numel, dtype)
