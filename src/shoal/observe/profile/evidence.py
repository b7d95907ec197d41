"""How sure a share of the step is: its mean over rounds of steps, and the interval that noise leaves around it. Pure.

The recorded steps are cut into n rounds, and each gives the share once. Of n shares with mean m and standard deviation
s, the true one lies above

    m - t s / sqrt(n),   t the 0.99 quantile of Student's distribution with n - 1 degrees of freedom,

in 99 of 100 profiles. A bottleneck is named where that is more than what counts; one round alone says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import msgspec

from shoal.observe.profile.recording import Recording

MOST_ROUNDS = 20
_STUDENT = (
    31.82, 6.96, 4.54, 3.75, 3.36, 3.14, 3.00, 2.90, 2.82, 2.76, 2.72, 2.68, 2.65, 2.62, 2.60, 2.58, 2.57, 2.55, 2.54,
)  # fmt: skip
"""By degrees of freedom, from 1 on."""


@dataclass(frozen=True)
class Share:
    """Where the true share lies: `low` to `high`."""

    low: float
    high: float


def interval(shares: Sequence[float]) -> Share:
    """Of shares of 2 to `MOST_ROUNDS` rounds; everything is possible where there is one."""
    if len(shares) < 2:
        return Share(0.0, 1.0)
    beside = _STUDENT[len(shares) - 2] * stdev(shares) / math.sqrt(len(shares))
    return Share(mean(shares) - beside, mean(shares) + beside)


def rounds(recording: Recording) -> list[Recording]:
    """The recording cut into rounds of equally many steps, one after the other; the last may have more."""
    steps = recording.steps
    count = min(len(steps), MOST_ROUNDS)
    size = len(steps) // max(1, count)
    found = []
    for number in range(count):
        own = steps[number * size : (number + 1) * size if number < count - 1 else len(steps)]
        begin_s, end_s = own[0].begin_s, own[-1].end_s
        inside = {
            name: [one for one in getattr(recording, name) if one.end_s > begin_s and one.begin_s < end_s]
            for name in ("slices", "calls", "waits")
        }
        found.append(msgspec.structs.replace(recording, steps=own, **inside))
    return found
