"""The line through measured times of a collective: t = alpha + beta S (Hockney 1994), alpha and beta not negative.

Times span four decades, and a microsecond counts as much at the short end as a millisecond at the long one. So what is
least is the sum of the squared relative errors,

    sum_i ((alpha + beta S_i - t_i) / t_i)^2,

a weighted linear least-squares problem in two unknowns. A bound that is broken is kept by fitting the other alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Seconds of the shortest message, seconds of each further byte, and how far the worst point lies off."""

    alpha_s: float
    beta_s: float
    worst_off: float

    @property
    def bytes_s(self) -> float:
        """The rate that long messages reach, in bytes per second; infinite where time does not depend on size."""
        return 1 / self.beta_s if self.beta_s else float("inf")

    def seconds(self, size_bytes: float) -> float:
        """What the line says of a message."""
        return self.alpha_s + self.beta_s * size_bytes


def fit(sizes: Sequence[float], times_s: Sequence[float]) -> Line:
    """The line through at least two different `sizes` in bytes and their times, all positive.

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(times_s) or min(times_s) <= 0:
        raise ValueError(
            f"{len(set(sizes))} sizes with {len(times_s)} times; a line takes two sizes and positive times"
        )
    alpha, beta = _bounded(sizes, times_s)
    worst = max(abs(alpha + beta * size - time) / time for size, time in zip(sizes, times_s, strict=True))
    return Line(alpha, beta, worst)


def _bounded(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    weights = [1 / time**2 for time in times]
    one = sum(weights)
    s = sum(w * size for w, size in zip(weights, sizes, strict=True))
    ss = sum(w * size * size for w, size in zip(weights, sizes, strict=True))
    t = sum(w * time for w, time in zip(weights, times, strict=True))
    st = sum(w * size * time for w, size, time in zip(weights, sizes, times, strict=True))
    alpha, beta = (ss * t - s * st) / (one * ss - s * s), (one * st - s * t) / (one * ss - s * s)
    if alpha < 0:
        return 0.0, st / ss
    return (t / one, 0.0) if beta < 0 else (alpha, beta)
