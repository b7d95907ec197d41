"""Measured layouts beside their predictions: rows, worst first, and the promised figures. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.recipes.benchmarks.paired import check

FAR_APART = 0.10
"""Layouts whose measured steps differ by more than this have an order."""
MEDIAN_ERROR, ORDER, NEAR, NEAR_SHARE, TOO_LOW = 0.10, 0.90, 0.05, 0.90, 0.10


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One layout. `calibrated`: its measured step gave the machine's factor, so that its time counts in no figure."""

    layout: str
    ranks: int
    measured_s: float
    predicted_s: float
    measured_bytes: float
    predicted_bytes: float
    calibrated: bool = False

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured bytes, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def rows(found: Iterable[Beside]) -> list[dict[str, Any]]:
    """Worst first; the calibrated one last."""
    ordered = sorted(found, key=lambda one: (one.calibrated, -abs(one.error)))
    return [
        {
            "layout": one.layout,
            "ranks": one.ranks,
            "measured_ms": round(1e3 * one.measured_s, 2),
            "predicted_ms": round(1e3 * one.predicted_s, 2),
            "error": round(one.error, 4),
            "measured_mb": round(one.measured_bytes / 1e6, 2),
            "predicted_mb": round(one.predicted_bytes / 1e6, 2),
            "memory_error": round(one.memory_error, 4),
            "calibrated": one.calibrated,
        }
        for one in ordered
    ]


def checks(found: Sequence[Beside]) -> list[dict[str, Any]]:
    """The promised figures."""
    timed = [one for one in found if not one.calibrated]
    memory = [one.memory_error for one in found]
    near = sum(abs(error) <= NEAR for error in memory) / len(memory)
    return [
        check(
            "step time: median error", statistics.median(abs(one.error) for one in timed), MEDIAN_ERROR, at_most=True
        ),
        check("step time: order right, share of pairs over 10 % apart", order_right(timed), ORDER),
        check("memory: share of layouts within 5 %", near, NEAR_SHARE),
        check("memory: most too low", max(0.0, -min(memory)), TOO_LOW, at_most=True),
    ]


def order_right(found: Sequence[Beside]) -> float:
    """The share of pairs, measured over a tenth apart, that are predicted in their order; 1 where there is none."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(found, 2)
        if max(a.measured_s, b.measured_s) > (1 + FAR_APART) * min(a.measured_s, b.measured_s)
    ]
    right = sum((a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in pairs)
    return right / len(pairs) if pairs else 1.0
