"""Seconds of an operator at any size, from its measured times on a grid of sizes.

Between sizes the logarithm of the seconds is interpolated linearly in the logarithms of m, n and k. Above the largest
size the seconds of one unit of work stay what they are there; below the smallest, a launch costs what it costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.topology.calibration import OperatorTime

Size = tuple[int, int, int]
LEAST_S = 1e-15
"""In the place of no backward at all, which has no logarithm."""


@dataclass(frozen=True)
class Sweep:
    """One operator. `log_cost[size]` are the logarithms of its (forward, backward) seconds."""

    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    log_cost: Mapping[Size, tuple[float, float]]

    def seconds(self, m: float, n: float = 1, k: float = 1) -> tuple[float, float]:
        """(forward, backward) seconds at one size; 0 of nothing."""
        if min(m, n, k) <= 0:
            return 0.0, 0.0
        corners = [_around(axis, value) for axis, value in zip(self.axes, (m, n, k), strict=True)]
        forward = backward = 0.0
        for corner in itertools.product(*corners):
            weight = math.prod(share for _, share in corner)
            logs = self.log_cost[corner[0][0], corner[1][0], corner[2][0]]
            forward, backward = forward + weight * logs[0], backward + weight * logs[1]
        beyond = math.prod(max(1.0, value / axis[-1]) for axis, value in zip(self.axes, (m, n, k), strict=True))
        return beyond * math.exp(forward), beyond * math.exp(backward)


def sweep_of(times: Iterable[OperatorTime]) -> Sweep:
    """The sweep of one operator. Raises `ConfigError` where sizes are missing between others."""
    known = {(t.m, t.n, t.k): t for t in times}
    axes = tuple(tuple(sorted({size[axis] for size in known})) for axis in range(3))
    missing = next((size for size in itertools.product(*axes) if size not in known), None)
    if missing is not None:
        name = next(iter(known.values())).operator
        raise ConfigError(
            f"the calibration's times of {name} lack the size {missing}, which lies between others; measure them anew "
            "with 'shoal bench products'"
        )
    return Sweep((axes[0], axes[1], axes[2]), {size: _logs(time) for size, time in known.items()})


def _logs(time: OperatorTime) -> tuple[float, float]:
    return math.log(time.forward_s), math.log(max(time.backward_s, LEAST_S))


def _around(axis: Sequence[int], value: float) -> list[tuple[int, float]]:
    """The neighbours of `value` on an axis, and their weights."""
    if value <= axis[0]:
        return [(axis[0], 1.0)]
    if value >= axis[-1]:
        return [(axis[-1], 1.0)]
    upper = next(i for i, one in enumerate(axis) if one >= value)
    low, high = axis[upper - 1], axis[upper]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]
