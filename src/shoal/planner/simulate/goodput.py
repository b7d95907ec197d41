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
