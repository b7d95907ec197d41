"""TernGrad: -1, 0 or 1 for every number, and one scale a block; 1.6 bits a number.

    y_i = s sign(x_i) b_i,   b_i = 1 with probability |x_i| / s,   s = max |x_i| over the block

(Wen et al., "TernGrad: Ternary Gradients to Reduce Communication", arXiv:1705.07878, equations 1 to 3.) Unbiased. The
paper first clips to 2.5 standard deviations, which is not unbiased; small blocks keep s near the numbers instead.
"""

from __future__ import annotations

from shoal.codec.config import TernGradConfig
from shoal.codec.quantise import Quantised


class TernGrad(Quantised):
    """`TernGradConfig`, on the wire."""

    def __init__(self, config: TernGradConfig) -> None:
        super().__init__(block=config.block, levels=1, scale="largest", rounding="stochastic")
