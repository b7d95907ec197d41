"""Blockwise integers: a block shares one scale, and every number becomes an integer of 8 or 4 bits.

    s = max |x_i| / L,   q_i = round(x_i / s),   y_i = s q_i,      L = 127 or 7

(Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, section 2.1, with linear levels.) To
nearest: |x - y| <= s / 2. Stochastic: up with the probability of the fraction that is cut off, so that E[y] = x.
"""

from __future__ import annotations

from shoal.codec.config import BlockwiseConfig
from shoal.codec.quantise import Quantised


class Blockwise(Quantised):
    """`BlockwiseConfig`, on the wire."""

    def __init__(self, config: BlockwiseConfig) -> None:
        super().__init__(block=config.block, levels=config.levels, scale="largest", rounding=config.rounding)
