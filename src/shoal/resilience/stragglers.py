"""Slow replicas, by robust statistics over what each step cost each replica, waiting for others left out.

Work on logarithms, since noise of run times is multiplicative. Over the last `WINDOW` steps a replica's level is the
median m_r, and its noise s_r is 1.4826 times the median absolute deviation. Against the median M of the others' levels

    z = (m_r - M) / (1.2533 s sqrt(1 / WINDOW) sqrt(1 + 1 / (n - 1))),   s the median of all s_r

is about standard normal while all are alike: 1.2533 is the ratio of a median's standard error to a mean's (Huber,
"Robust statistics", 1981). A replica is slow when z > `SIGMAS` and it costs `RATIO` of the others: the first keeps
noise from being an alarm, the second what is too little to matter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

WINDOW = 16
SIGMAS = 6.0
RATIO = 1.2
_LEAST_NOISE = 0.005


@dataclass(frozen=True)
class Slow:
    """`ratio`: how many times the others' cost a step has on this replica."""

    replica: str
    ratio: float

    @property
    def sentence(self) -> str:
        """For people."""
        return f"replica {self.replica} needs {self.ratio:.2f} times as long for a step as the others: check its host"


@dataclass
class Stragglers:
    """What the members of one generation needed for its last steps."""

    times: dict[str, deque[float]] = field(default_factory=dict)

    def took(self, step_s: Mapping[str, float]) -> list[Slow]:
        """One step's seconds by replica, without waiting; who is slow now, the slowest first.

        Replicas that are not in `step_s` are forgotten. Raises `ValueError` for seconds that are not positive.
        """
        for name, seconds in step_s.items():
            if not seconds > 0 or not math.isfinite(seconds):
                raise ValueError(f"a step of replica {name} took {seconds} s: it must be positive and finite")
        self.times = {name: self.times.get(name, deque(maxlen=WINDOW)) for name in step_s}
        for name, seconds in step_s.items():
            self.times[name].append(math.log(seconds))
        full = {name: list(row) for name, row in self.times.items() if len(row) == WINDOW}
        return _slow(full) if len(full) > 1 else []


def _slow(rows: dict[str, list[float]]) -> list[Slow]:
    levels = {name: median(row) for name, row in rows.items()}
    spreads = [1.4826 * median(abs(value - levels[name]) for value in row) for name, row in rows.items()]
    noise = max(median(spreads), _LEAST_NOISE)
    error = 1.2533 * noise * math.sqrt((1 + 1 / (len(rows) - 1)) / WINDOW)
    ordered = sorted(levels.values())
    found = []
    for name, level in levels.items():
        if level <= ordered[len(ordered) // 2 - 1]:
            continue  # not above the middle
        above = level - median(value for other, value in levels.items() if other != name)
        if above > SIGMAS * error and above > math.log(RATIO):
            found.append(Slow(name, math.exp(above)))
    return sorted(found, key=lambda slow: -slow.ratio)
