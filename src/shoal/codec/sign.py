"""One bit: the sign of every number, and one scale a block.

    y_i = s sign(x_i),   s = mean |x_i| over the block

(Seide et al., Interspeech 2014; the scale of Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv:1901.09847,
algorithm 1.) The scale makes y the closest vector of the form c sign(x), and leaves |x - y|^2 = |x|^2 - |x|_1^2 / d
in a block of d numbers. Biased: it needs error feedback. Zero counts as positive.
"""

from __future__ import annotations

from shoal.codec.config import SignConfig
from shoal.codec.quantise import Quantised


class Sign(Quantised):
    """`SignConfig`, on the wire."""

    def __init__(self, config: SignConfig) -> None:
        super().__init__(block=config.block, levels=1, scale="mean", rounding="sign")
