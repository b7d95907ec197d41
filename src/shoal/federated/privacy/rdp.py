"""The accountant: Renyi differential privacy of the sampled Gaussian mechanism.

Each step takes every member with chance q and adds noise of z times the clip norm. Its Renyi divergence of order a is

    rdp = log A / (a - 1),   A = E over x ~ N(0, z^2) of ((1 - q) + q exp((2 x - 1) / (2 z^2)))^a

(Mironov, Talwar, Zhang, arXiv:1908.10530, section 3.3), and steps add up. Then for every order

    epsilon = rdp + log((a - 1) / a) - (log delta + log a) / (a - 1)

(Balle et al., arXiv:1905.09982, theorem 21; Canonne, Kamath, Steinke, arXiv:2004.00010, proposition 12), and the
smallest counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)), 128.0, 256.0, 512.0)


def epsilon(*, noise: float, chance: float, steps: int, delta: float, orders: Sequence[float] = ORDERS) -> float:
    """What `steps` steps of noise multiplier `noise` and sampling `chance` spend, at `delta`."""
    if steps == 0:
        return 0.0
    spent = [
        steps * divergence(order, noise=noise, chance=chance)
        + math.log1p(-1 / order)
        - (math.log(delta) + math.log(order)) / (order - 1)
        for order in orders
    ]
    return max(0.0, min(spent))


def most_steps(*, noise: float, chance: float, delta: float, budget: float, limit: int) -> int:
    """How many steps, `limit` at most, stay within the `budget`."""
    each = [(order, divergence(order, noise=noise, chance=chance)) for order in ORDERS]

    def spent(steps: int) -> float:
        return min(
            steps * one + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
            for order, one in each
        )

    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if spent(middle) <= budget else (low, middle - 1)
    return low


@functools.cache
def divergence(order: float, *, noise: float, chance: float) -> float:
    """The Renyi divergence of one step, of an order above 1."""
    if chance == 0:
        return 0.0
    if chance == 1:
        return order / (2 * noise**2)
    whole = float(order).is_integer()
    log_a = _log_moment_whole(int(order), noise, chance) if whole else _log_moment(order, noise, chance)
    return log_a / (order - 1)


def _log_moment_whole(order: int, noise: float, chance: float) -> float:
    """log A for whole orders: a binomial sum."""
    total = -math.inf
    for k in range(order + 1):
        term = _log_binomial(order, k) + k * math.log(chance) + (order - k) * math.log1p(-chance)
        total = _log_add(total, term + (k * k - k) / (2 * noise**2))
    return total


def _log_moment(order: float, noise: float, chance: float) -> float:
    """log A for any order: two series, of either side of the point where both densities are equal."""
    split = noise**2 * math.log(1 / chance - 1) + 0.5
    below = above = -math.inf
    log_coefficient, sign = 0.0, 1.0
    for k in range(10_000):
        j = order - k
        low = log_coefficient + k * math.log(chance) + j * math.log1p(-chance) + (k * k - k) / (2 * noise**2)
        high = log_coefficient + j * math.log(chance) + k * math.log1p(-chance) + (j * j - j) / (2 * noise**2)
        low += _log_half_erfc((k - split) / (math.sqrt(2) * noise))
        high += _log_half_erfc((split - j) / (math.sqrt(2) * noise))
        below = _log_add(below, low) if sign > 0 else _log_subtract(below, low)
        above = _log_add(above, high) if sign > 0 else _log_subtract(above, high)
        if max(low, high) < -30 and k > order:
            break
        factor = (order - k) / (k + 1)
        log_coefficient, sign = log_coefficient + math.log(abs(factor)), sign * math.copysign(1.0, factor)
    return _log_add(below, above)


def _log_half_erfc(x: float) -> float:
    """log(erfc(x) / 2), for large x by its continued expansion."""
    if x < 25:
        return math.log(math.erfc(x) / 2)
    return -(x**2) - math.log(2 * x * math.sqrt(math.pi)) + math.log1p(-1 / (2 * x**2) + 3 / (4 * x**4))


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_add(left: float, right: float) -> float:
    low, high = min(left, right), max(left, right)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def _log_subtract(left: float, right: float) -> float:
    """log(exp(left) - exp(right)); what rounding makes negative is nothing."""
    if right >= left:
        return -math.inf
    return left + math.log(-math.expm1(right - left)) if right > -math.inf else left
