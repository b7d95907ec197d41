"""The gradient noise scale (arXiv:1812.06162).

G is the gradient of the loss over all data, Sigma the covariance of one sample's gradient, G_B the mean over B
samples:

    E |G_B|^2 = |G|^2 + tr(Sigma) / B                                   appendix A.1
    B_simple  = tr(Sigma) / |G|^2                                       section 2.2
    step at B = best step / (1 + B_noise / B), so                       sections 2.2, 2.3
    S = S_min (1 + B_noise / B)      E = B S = E_min (1 + B / B_noise)      E_min = B_noise S_min

Two batch sizes of one step give |G|^2 and tr(Sigma) without bias. Their ratio would have one, so that both are
averaged over steps before they are divided. Batches count samples; of a language model a sample is a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Moments:
    """`signal` is |G|^2 and `trace` is tr(Sigma); estimates of one step may be negative."""

    signal: float
    trace: float

    @property
    def scale(self) -> float:
        """B_simple in samples; not a number where the signal is lost in noise."""
        return self.trace / self.signal if self.signal > 0 else math.nan


def moments(small_square: float, big_square: float, *, small_inverse: float, big_inverse: float) -> Moments:
    """From the mean squared norms of gradients of two batch sizes, whose inverses are given (A.1, equations of both).

    Inverses, because the mean of 1/B is what counts where the small batches are not of one size.

    Raises:
        ValueError: the small batch is not smaller.
    """
    if small_inverse <= big_inverse:
        raise ValueError(f"1/B is {small_inverse:g} for the small batch and {big_inverse:g} for the big one")
    trace = (small_square - big_square) / (small_inverse - big_inverse)
    return Moments(signal=big_square - trace * big_inverse, trace=trace)


@dataclass(frozen=True, kw_only=True)
class MovingMoments:
    """Exponential moving averages of both moments, without the bias of their start at 0."""

    decay: float
    sums: Moments = Moments(signal=0.0, trace=0.0)
    weight: float = 0.0

    def after(self, new: Moments) -> MovingMoments:
        """With one more step."""
        keep, add = self.decay, 1 - self.decay
        sums = Moments(
            signal=keep * self.sums.signal + add * new.signal, trace=keep * self.sums.trace + add * new.trace
        )
        return MovingMoments(decay=keep, sums=sums, weight=keep * self.weight + add)

    @property
    def mean(self) -> Moments:
        """The averages; zeros before the first step."""
        weight = self.weight or 1.0
        return Moments(signal=self.sums.signal / weight, trace=self.sums.trace / weight)
