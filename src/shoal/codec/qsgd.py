"""QSGD: a block's 2-norm, and for every number a random one of the two levels beside it.

    y_i = |x|_2 sign(x_i) l_i / L,   l_i in {0 .. L} rounded at random from L |x_i| / |x|_2

(Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", arXiv:1610.02132,
equation 3.) Unbiased. In a block of d numbers E|x - y|^2 <= min(d / L^2, sqrt(d) / L) |x|^2 (lemma 3.1). Levels are
sent in 8 or 4 bits, without the paper's Elias code, so that the bytes are known beforehand.
"""

from __future__ import annotations

from shoal.codec.config import QSGDConfig
from shoal.codec.quantise import Quantised


class QSGD(Quantised):
    """`QSGDConfig`, on the wire."""

    def __init__(self, config: QSGDConfig) -> None:
        levels = (1 << (config.bits - 1)) - 1
        super().__init__(block=config.block, levels=levels, scale="norm", rounding="stochastic")
