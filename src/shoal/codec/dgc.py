"""Deep Gradient Compression: top-k of velocities, with more numbers at first.

    sent at sum t = max(fraction, 0.25^(1 + floor((t - 1) s / T))),    s powers of four to the fraction, T warm-up sums

(Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 3.3: 25 %, 6.25 %, 1.6 %, 0.4 %, 0.1 % in turn; here
in as many equal parts of the warm-up as it takes powers of four.) Velocities, momentum correction, local clipping and
factor masking are those of the exchange that is made for it. Biased: it needs error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.codec.codec import TensorPlace
from shoal.codec.config import DGCConfig, TopKConfig
from shoal.codec.top_k import TopK

FIRST = 0.25


class DGC(TopK):
    """`DGCConfig`, on the wire. Until it is bound, and its first sum begins, it keeps what it keeps in the end."""

    def __init__(self, config: DGCConfig) -> None:
        super().__init__(TopKConfig(fraction=config.fraction, selection=config.selection))
        self._config = config

    def bound(self, places: Sequence[TensorPlace], *, key: int, rank: int, ranks: int) -> DGC:
        return DGC(self._config)

    def begin(self, number: int) -> None:
        self._fraction = fraction_at(number, self._config.fraction, warmup=self._config.warmup_steps)


def fraction_at(number: int, fraction: float, *, warmup: int) -> float:
    """The part of the numbers that is sent in sum `number`, from 1 on."""
    stages = math.ceil(math.log(fraction, FIRST) - 1e-9)  # powers of four that are larger than the fraction, and one
    if number > warmup or stages < 1:
        return fraction
    return max(fraction, FIRST ** (1 + (number - 1) * stages // warmup))
