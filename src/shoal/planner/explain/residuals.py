"""How far predictions were off so far, and what follows for the next one: an interval, and the odds of running out.

`ratios` are measured over predicted; those of a step follow from the kind of evidence behind its prediction. An
interval is the prediction times their quantiles, with no assumption on their shape. Memory is asked about far out in
the tail, where there are no rows: there the logarithms of the ratios are taken as normal, wider by 1 + 1/n for what n
rows leave unknown of it (the predictive distribution of a mean).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shoal.planner.predict.predictor import Prediction

FEWEST = 20
"""Rows without which a 90 % interval would have no row beyond each of its ends."""


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Ratios of measured to predicted, or quantiles of them at even steps; `count` rows lie behind them.

    `source` says of what they are, as it stands in a sentence.
    """

    source: str
    ratios: tuple[float, ...]
    count: int

    @classmethod
    def of(cls, ratios: Sequence[float], source: str) -> Residuals:
        """From the rows themselves."""
        return cls(source=source, ratios=tuple(sorted(ratios)), count=len(ratios))

    def quantile(self, share: float) -> float:
        """The ratio below which `share` of them lie, interpolated."""
        place = share * (len(self.ratios) - 1)
        below = min(int(place), len(self.ratios) - 2)
        return self.ratios[below] + (place - below) * (self.ratios[below + 1] - self.ratios[below])

    def interval(self, predicted: float, *, level: float = 0.9) -> tuple[float, float]:
        """Where `level` of measurements lie, in the unit of `predicted`."""
        return predicted * self.quantile((1 - level) / 2), predicted * self.quantile((1 + level) / 2)

    def exceeds(self, predicted: float, limit: float) -> float:
        """The probability that the measurement is above `limit`."""
        logs = [math.log(ratio) for ratio in self.ratios]
        spread = statistics.stdev(logs) * math.sqrt(1 + 1 / self.count)
        return 1 - statistics.NormalDist(statistics.mean(logs), spread).cdf(math.log(limit / predicted))


Evidence = Literal["calibrated", "same machine type", "data sheet"]
"""What a prediction of a step stands on: one measured step of this cluster, one of another cluster of the same
machines, or data sheets alone."""

PUBLISHED_TIME: Mapping[Evidence, Residuals] = MappingProxyType(
    {
        "calibrated": Residuals(
            source="877 published steps of 26 tables, each calibrated on one of its own rows (benchmarks.plan)",
            ratios=(
                0.742, 0.894, 0.935, 0.952, 0.963, 0.973, 0.98, 0.984, 0.99, 0.997, 1.005,
                1.014, 1.027, 1.04, 1.056, 1.071, 1.094, 1.155, 1.22, 1.378, 1.746,
            ),
            count=877,
        ),
        "same machine type": Residuals(
            source="3137 published steps, calibrated on rows of other tables of the same device (benchmarks.plan)",
            ratios=(
                0.622, 0.8, 0.849, 0.877, 0.907, 0.929, 0.947, 0.962, 0.975, 0.987, 1.003,
                1.015, 1.023, 1.037, 1.052, 1.071, 1.091, 1.123, 1.16, 1.336, 1.734,
            ),
            count=3137,
        ),
        "data sheet": Residuals(
            source="903 published steps of 26 tables, nothing calibrated (benchmarks.plan)",
            ratios=(
                0.77, 0.926, 0.984, 1.008, 1.025, 1.046, 1.059, 1.074, 1.092, 1.111, 1.128,
                1.156, 1.182, 1.212, 1.251, 1.28, 1.347, 1.483, 1.636, 1.822, 3.133,
            ),
            count=903,
        ),
    }
)  # fmt: skip
PUBLISHED_MEMORY = Residuals(
    source="48 published peaks on A100s, the allocator's slack in them (arXiv:2401.10241, table 4)",
    ratios=(
        0.918, 0.918, 0.918, 0.95, 0.954, 0.954, 0.954, 0.954, 0.955, 0.956, 0.958,
        0.96, 0.962, 0.973, 0.979, 0.981, 0.985, 0.988, 1.001, 1.011, 1.043,
    ),
    count=48,
)  # fmt: skip


def confidence_record(
    one: Prediction, limit_bytes: float, *, time: Residuals | None, memory: Residuals
) -> dict[str, Any]:
    """The interval of the step (None where its rates are assumed), the odds of running out of memory, their sources."""
    return {
        "level": 0.9,
        "step_s": None if time is None else list(time.interval(one.step_s)),
        "step_source": "assumed rates" if time is None else time.source,
        "out_of_memory": memory.exceeds(one.memory_bytes, limit_bytes),
        "memory_source": memory.source,
    }
