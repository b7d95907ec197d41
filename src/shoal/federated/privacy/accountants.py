"""Accountants: what steps of the sampled Gaussian mechanism spend, and how many rounds a budget allows.

Each step takes every member with chance q and adds noise of z times the clip norm.

**Renyi differential privacy.** The divergence of order a of one step is

    rdp = log A / (a - 1),   A = E over x ~ N(0, z^2) of ((1 - q) + q exp((2 x - 1) / (2 z^2)))^a

(Mironov, Talwar, Zhang, arXiv:1908.10530, section 3.3), and steps add up. Then for every order

    epsilon = rdp + log((a - 1) / a) - (log delta + log a) / (a - 1)

(Balle et al., arXiv:1905.09982, theorem 21; Canonne, Kamath, Steinke, arXiv:2004.00010, proposition 12), and the
smallest counts.

**PRV**, tighter: the distribution of the privacy loss itself, composed by Fourier transforms. With
P = (1 - q) N(0, z^2) + q N(1, z^2) and Q = N(0, z^2), one step loses, where a member was there and is taken away,

    Y = L(x),  x ~ P,   L(x) = log((1 - q) + q exp((2 x - 1) / (2 z^2)))

and where it was not there and is added -L(x), x ~ Q. Losses of k steps add up: their distribution is the k-fold
convolution of that of Y, here on a mesh of width h, by one transform, a power, and one transform back. Then

    delta(epsilon) = E of (1 - exp(epsilon - Y))+

is exact but for the mesh and its ends. With h = error / sqrt(k / 2 log(12 / delta_error)) the epsilon of
delta - delta_error, plus `error`, is an upper bound (Gopi, Lee, Wutschitz, arXiv:2106.02848, theorem 5.5). The larger
of both directions counts.

**Skellam noise.** Clients add whole numbers, whose sum is the difference of two Poisson numbers, of variance mu in all.
For updates of whole numbers with norms D1 and D2 (Agarwal, Kairouz, Liu, arXiv:2110.04995) and whole orders

    rdp = a D2^2 / (2 mu) + min(((2 a - 1) D2^2 + 6 D1) / (4 mu^2), 3 D1 / (2 mu))

and where each client takes part with chance q (Zhu, Wang, ICML 2019, theorem 6)

    rdp_q = log((1 - q)^(a-1) (a q - q + 1) + C(a, 2) q^2 (1 - q)^(a-2) exp(rdp(2))
                + 3 sum over l = 3 ... a of C(a, l) (1 - q)^(a-l) q^l exp((l - 1) rdp(l))) / (a - 1)

**The budget** is that of whoever spends most.

    client   a round is one step: each client takes part with chance q = cohort / clients
    sample   a local step is one: each sample of n is in a batch with chance B / n; the client with the fewest samples
             spends most, and its bound is the run's
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.federated.config import FederatedConfig, PrivacyConfig

WHOLE_ORDERS = (*range(2, 64), 128, 256)
ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)), 128.0, 256.0, 512.0)


def rdp_epsilon(*, noise: float, chance: float, steps: int, delta: float, orders: Sequence[float] = ORDERS) -> float:
    """What `steps` steps of noise multiplier `noise` and sampling `chance` spend, at `delta`."""
    return _least_epsilon([(order, divergence(order, noise=noise, chance=chance)) for order in orders], steps, delta)


def most_steps(*, noise: float, chance: float, delta: float, budget: float, limit: int) -> int:
    """How many steps, `limit` at most, stay within the `budget`."""
    each = [(order, divergence(order, noise=noise, chance=chance)) for order in ORDERS]
    return _most(limit, lambda steps: _least_epsilon(each, steps, delta) <= budget)


def _least_epsilon(each: Sequence[tuple[float, float]], steps: int, delta: float) -> float:
    """The smallest epsilon of so many steps, over (order, divergence of one step)."""
    spent = (
        steps * one + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1) for order, one in each
    )
    return max(0.0, min(spent)) if steps else 0.0


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `limit` for which it holds; it does for 0 and for all below."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
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


ERROR = 0.01
"""Of epsilon."""
DELTA_ERROR = 1e-3
"""The part of delta that the mesh may cost."""


def prv_epsilon(*, noise: float, chance: float, steps: int, delta: float, error: float = ERROR) -> float:
    """An upper bound of what `steps` steps of noise multiplier `noise` and sampling `chance` spend, at `delta`."""
    if steps == 0 or chance == 0:
        return 0.0
    delta_error = DELTA_ERROR * delta
    far = max(
        rdp_epsilon(noise=noise, chance=chance, steps=steps, delta=delta_error / 4),
        rdp_epsilon(noise=noise, chance=chance, steps=1, delta=delta_error / (8 * steps)),
    )
    width = error / math.sqrt(steps / 2 * math.log(12 / delta_error))
    half = math.ceil((far + 3) / width)
    mesh = (torch.arange(2 * half, dtype=torch.float64) - half) * width
    found = 0.0
    for masses in (_removed(mesh, width, noise, chance), _added(mesh, width, noise, chance)):
        composed = _composed(masses.numpy(), steps)
        found = max(found, _epsilon_of(mesh.numpy(), composed, delta - delta_error))
    return found + error


def _removed(mesh: Tensor, width: float, noise: float, chance: float) -> Tensor:
    """The mass of L(x), x ~ P, around every point of the mesh."""

    def above(x: Tensor) -> Tensor:
        return (1 - chance) * torch.special.ndtr(-x / noise) + chance * torch.special.ndtr((1 - x) / noise)

    def below(x: Tensor) -> Tensor:
        return (1 - chance) * torch.special.ndtr(x / noise) + chance * torch.special.ndtr((x - 1) / noise)

    edges = _inverse(_edges(mesh, width), noise, chance)
    return _masses(edges, above, below)


def _added(mesh: Tensor, width: float, noise: float, chance: float) -> Tensor:
    """The mass of -L(x), x ~ Q, around every point of the mesh."""
    edges = -_inverse(-_edges(mesh, width), noise, chance)  # -L(x) <= t where -x <= this
    return _masses(edges, lambda x: torch.special.ndtr(-x / noise), lambda x: torch.special.ndtr(x / noise))


def _edges(mesh: Tensor, width: float) -> Tensor:
    return torch.cat([mesh - width / 2, mesh[-1:] + width / 2])


def _inverse(loss: Tensor, noise: float, chance: float) -> Tensor:
    """x with L(x) = loss; minus infinity where no x loses so little."""
    inside = torch.expm1(loss) + chance
    known = noise**2 * (inside.clamp(min=1e-300).log() - math.log(chance)) + 0.5
    return torch.where(inside > 0, known, -torch.inf)


def _masses(edges: Tensor, above: Callable[[Tensor], Tensor], below: Callable[[Tensor], Tensor]) -> Tensor:
    """What lies between neighbouring edges, from the tail that is nearer, so that small masses keep their digits."""
    by_tail, by_head = above(edges[:-1]) - above(edges[1:]), below(edges[1:]) - below(edges[:-1])
    return torch.where(edges[:-1] > 0, by_tail, by_head).nan_to_num()


def _composed(masses: np.ndarray, steps: int) -> np.ndarray:
    """The masses of the sum of `steps` losses, on the same mesh."""
    spectrum = np.fft.rfft(np.fft.ifftshift(masses))
    return np.fft.fftshift(np.fft.irfft(spectrum**steps, len(masses)))


def _epsilon_of(mesh: np.ndarray, masses: np.ndarray, delta: float) -> float:
    """The smallest epsilon from 0 whose delta is at most this."""
    low, high = 0.0, float(mesh[-1])
    mesh, masses = mesh[mesh > 0], masses[mesh > 0]
    for _ in range(40):
        middle = (low + high) / 2
        first = int(np.searchsorted(mesh, middle, side="right"))
        spent = float((masses[first:] * -np.expm1(middle - mesh[first:])).sum())
        low, high = (low, middle) if spent <= delta else (middle, high)
    return high


@dataclass(frozen=True)
class Skellam:
    """Noise of `variance` on sums of whole numbers, of which one client changes at most `norm1` and `norm2`."""

    variance: float
    norm1: float
    norm2: float


def skellam_divergence(order: int, noise: Skellam) -> float:
    """The Renyi divergence of one sum in which everybody takes part, of a whole order above 1."""
    square = noise.norm2**2
    first = ((2 * order - 1) * square + 6 * noise.norm1) / (4 * noise.variance**2)
    return order * square / (2 * noise.variance) + min(first, 3 * noise.norm1 / (2 * noise.variance))


@functools.cache
def sampled_skellam(order: int, noise: Skellam, chance: float) -> float:
    """The same where each client takes part with `chance`."""
    if chance == 1:
        return skellam_divergence(order, noise)
    log_in, log_out = math.log(chance), math.log1p(-chance)
    total = (order - 1) * log_out + math.log(order * chance - chance + 1)
    for part in range(2, order + 1):
        term = _log_binomial(order, part) + part * log_in + (order - part) * log_out
        term += (part - 1) * skellam_divergence(part, noise) + (math.log(3) if part > 2 else 0.0)
        total = _log_add(total, term)
    return total / (order - 1)


@dataclass(frozen=True)
class Budget:
    """`chance` and `steps_a_round` are those of whoever spends most. `skellam`: the noise that clients add."""

    config: PrivacyConfig
    chance: float
    steps_a_round: int = 1
    skellam: Skellam | None = None

    def spent(self, rounds: int) -> float:
        """Epsilon after so many rounds."""
        steps = rounds * self.steps_a_round
        if self.skellam is not None:
            noise, chance = self.skellam, self.chance
            each = [(order, sampled_skellam(int(order), noise, chance)) for order in WHOLE_ORDERS]
            return _least_epsilon(each, steps, self.config.delta)
        return rdp_epsilon(noise=self.config.noise, chance=self.chance, steps=steps, delta=self.config.delta)

    def rounds(self, wanted: int) -> int:
        """How many of the `wanted` rounds the budget allows. Raises `ConfigError` where it allows none."""
        limit = wanted * self.steps_a_round
        if self.skellam is not None:
            steps = _most(limit, lambda count: self.spent(count) <= self.config.epsilon)
        else:
            steps = most_steps(
                noise=self.config.noise,
                chance=self.chance,
                delta=self.config.delta,
                budget=self.config.epsilon,
                limit=limit,
            )
        if wanted and steps < self.steps_a_round:
            raise ConfigError(
                f"privacy.epsilon = {self.config.epsilon:g}: the first round would spend {self.spent(1):.3g}; raise "
                "privacy.noise, or the budget"
            )
        return steps // self.steps_a_round

    def facts(self, rounds: int) -> dict[str, float | str]:
        """What a report says; `epsilon` is that which the budget bounds, `epsilon_prv` a tighter bound of the same, for
        noise that is normal."""
        noise, delta = self.config.noise, self.config.delta
        tighter: dict[str, float] = {}
        if self.skellam is None:
            steps = rounds * self.steps_a_round
            tighter = {"epsilon_prv": prv_epsilon(noise=noise, chance=self.chance, steps=steps, delta=delta)}
        return {
            "unit": self.config.unit,
            "noise_by": self.config.noise_by,
            "epsilon": self.spent(rounds),
            **tighter,
            "budget": self.config.epsilon,
            "delta": delta,
            "noise": noise,
        }


def client_budget(privacy: PrivacyConfig, federated: FederatedConfig, *, skellam: Skellam | None = None) -> Budget:
    """That of privacy of clients."""
    return Budget(privacy, chance_of(federated), skellam=skellam)


def sample_budget(privacy: PrivacyConfig, *, batch: int, samples: int, steps: int) -> Budget:
    """That of privacy of samples, for a client of so many `samples` that takes `steps` local steps in a round."""
    return Budget(privacy, min(1.0, batch / samples), steps)


def chance_of(federated: FederatedConfig) -> float:
    """With which chance each client takes part in a round, where that is private."""
    return federated.cohort_size / federated.clients
