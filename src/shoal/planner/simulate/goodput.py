"""Weeks of training with failures: a coarse simulation in which a step is one number of seconds.

Failures come at random with a constant rate (intervals are exponential), whatever the job does at the moment. A cycle
is `every_s` seconds of training and then a save that holds the job up for `save_s`; it counts when the save is whole.
After a failure everything since the last whole save is done again, `recovery_s` later; a failure during the recovery
starts it anew. The share of all time that became training that lasted is the effective training time ratio
(arXiv:2407.21783, section 3.3.4; arXiv:2410.21680).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

WEEK_S = 7 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, and what is done about it. `between_s` is the job's mean time between failures."""

    between_s: float
    recovery_s: float
    save_s: float

    def __post_init__(self) -> None:
        if not self.between_s > 0 or self.recovery_s < 0 or self.save_s < 0:
            raise ValueError(
                f"{self}: failures come more than 0 s apart, recovery and save take 0 s or more; give such seconds"
            )


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time went, seconds; they add up to `wall_s`."""

    wall_s: float
    trained_s: float
    saving_s: float
    lost_s: float
    recovering_s: float
    failures: int

    @property
    def effective_share(self) -> float:
        """Training that lasted over all time."""
        return self.trained_s / self.wall_s


def goodput(faults: Faults, *, every_s: float, wall_s: float, seed: int = 0) -> Goodput:
    """`wall_s` seconds of a job that saves after every `every_s` seconds of training; deterministic by seed."""
    if not every_s > 0:
        raise ValueError(f"every_s = {every_s}: there is some training between two saves; give more than 0 s")
    draw = random.Random(seed)
    now = trained = saving = lost = recovering = 0.0
    failures = 0
    while now < wall_s:
        span = min(_exponential(draw, faults.between_s), wall_s - now)
        cycles = int(span // (every_s + faults.save_s))
        trained += cycles * every_s
        saving += cycles * faults.save_s
        begun = span - cycles * (every_s + faults.save_s)
        now += span
        if now >= wall_s:
            trained += min(begun, every_s)
            saving += max(0.0, begun - every_s)
            break
        lost += begun
        failures += 1
        took, again = _recovery(draw, faults)
        took = min(took, wall_s - now)
        recovering, failures, now = recovering + took, failures + again, now + took
    return Goodput(
        wall_s=wall_s,
        trained_s=trained,
        saving_s=saving,
        lost_s=lost,
        recovering_s=recovering,
        failures=failures,
    )


def best_interval(
    faults: Faults, *, wall_s: float, seeds: Sequence[int], around_s: float, points: int = 41, spread: float = 4.0
) -> float:
    """The interval that trains most in simulation, save included, between `around_s` / `spread` and times `spread`.

    Every interval meets the same failures (common random numbers), and a parabola through the logarithm of the
    interval smooths what is left of the noise.
    """
    steps = [math.log(spread) * (2 * point / (points - 1) - 1) for point in range(points)]
    shares = [_mean_share(faults, around_s * math.exp(step), wall_s, seeds) for step in steps]
    peak = max(range(points), key=shares.__getitem__)
    window = range(max(0, peak - points // 8), min(points, peak + points // 8 + 1))
    top = _vertex([steps[n] for n in window], [shares[n] for n in window])
    return around_s * math.exp(top) + faults.save_s


def _mean_share(faults: Faults, every_s: float, wall_s: float, seeds: Sequence[int]) -> float:
    runs = (goodput(faults, every_s=every_s, wall_s=wall_s, seed=seed) for seed in seeds)
    return sum(one.effective_share for one in runs) / len(seeds)


def _recovery(draw: random.Random, faults: Faults) -> tuple[float, int]:
    """(seconds until the job trains again, failures on the way)."""
    took, again = 0.0, 0
    while True:
        quiet = _exponential(draw, faults.between_s)
        if quiet >= faults.recovery_s:
            return took + faults.recovery_s, again
        took, again = took + quiet, again + 1


def _exponential(draw: random.Random, mean_s: float) -> float:
    return math.inf if math.isinf(mean_s) else draw.expovariate(1 / mean_s)


def _vertex(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Where the least-squares parabola through the points is largest; the best point where it has no maximum."""
    import numpy as np

    curve, slope, _ = np.polyfit(xs, ys, 2)
    best = xs[max(range(len(ys)), key=ys.__getitem__)]
    return float(min(max(-slope / (2 * curve), min(xs)), max(xs))) if curve < 0 else best
