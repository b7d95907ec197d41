"""Exposed communication of a program: what its step takes longer than on a network that takes no time.

    exposed(backend) = median over the turns of (step on the backend - step on the instant network)

Every turn has the program on the instant network twice (A/A). The interval of the median of their difference says how
much exposed communication this machine, at this moment, cannot distinguish from none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.bench.report import Check, Turns, check, columns, lower_bound, milliseconds, ratios

GLOO, OURS = "gloo", "shoal"
INSTANT, AGAIN, ALONE = "instant_network", "instant_network_again", "alone"
CALLS = "all_reduces_"
"""Prefix of a backend's name: the side of the step's all-reduces alone, one after the other."""
EXPOSED_LESS, NO_SLOWER, FSDP2_FASTER, FSDP2_TOKENS = 2.0, 1.0, 1.5, 256


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step. `noise_s`: how far from zero the median of A/A may be, at 95 % on either side."""

    gloo_s: float
    ours_s: float
    noise_s: float

    @property
    def measurable(self) -> bool:
        """Whether either is more than noise."""
        return max(self.gloo_s, self.ours_s) > self.noise_s

    @property
    def ratio(self) -> float:
        """Gloo's over ours; less than the noise counts as the noise."""
        return max(self.gloo_s, self.noise_s) / max(self.ours_s, self.noise_s)


def exposed(turns: Turns) -> Exposed:
    """From turns that have both backends, and the instant network twice."""
    again = _differences(turns, AGAIN)
    noise_s = max(-lower_bound(again), -lower_bound([-value for value in again]))
    ours_s, gloo_s = (statistics.median(_differences(turns, side)) for side in (OURS, GLOO))
    return Exposed(gloo_s, ours_s, noise_s)


def row_of(program: str, ranks: int, turns: Turns, *, tokens: int) -> dict[str, Any]:
    """A line of the table: milliseconds, and how many times faster a step on Shoal's backend is than on Gloo."""
    found, faster = exposed(turns), ratios(turns, OURS, peer=GLOO)
    return {
        "program": program,
        "ranks": ranks,
        "tokens_per_rank": tokens,
        "pairs": len(turns),
        **milliseconds(dict(sorted(columns(turns).items()))),
        "exposed_gloo_ms": round(1e3 * found.gloo_s, 2),
        "exposed_shoal_ms": round(1e3 * found.ours_s, 2),
        "not_measurable_below_ms": round(1e3 * found.noise_s, 2),
        "faster_median": round(statistics.median(faster), 4),
        "faster_lower_95": round(lower_bound(faster), 4),
    }


def checks_of(program: str, ranks: int, turns: Turns, *, tokens: int) -> list[Check]:
    """The promised figures. Where exposed communication is not measurable, the first is about the all-reduces alone."""
    where = f"{program}, {ranks} ranks, {tokens} tokens a rank"
    faster = ratios(turns, OURS, peer=GLOO)
    found = [_exposed_check(where, turns), check(f"{where}: step against Gloo's", statistics.median(faster), NO_SLOWER)]
    if program == "fsdp2" and tokens == FSDP2_TOKENS:
        found.append(check(f"{where}: FSDP2's step against Gloo's", statistics.median(faster), FSDP2_FASTER))
    return found


def _exposed_check(where: str, turns: Turns) -> Check:
    found, calls = exposed(turns), ratios(turns, CALLS + OURS, peer=CALLS + GLOO)
    noise = f"A/A {1e3 * found.noise_s:.1f} ms"
    if found.measurable:
        least = f", at least (Shoal's is within {noise})" if found.ours_s < found.noise_s else ""
        return check(f"{where}: exposed communication on Gloo over Shoal's{least}", found.ratio, EXPOSED_LESS)
    name = f"{where}: exposed communication not measurable ({noise})"
    if not calls:
        return check(name, found.ratio, EXPOSED_LESS)
    return check(f"{name}; its all-reduces alone, Gloo's over Shoal's", statistics.median(calls), EXPOSED_LESS)


def _differences(turns: Turns, side: str) -> Sequence[float]:
    return [turn[side] - turn[INSTANT] for turn in turns]
