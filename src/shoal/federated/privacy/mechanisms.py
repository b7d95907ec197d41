"""Mechanisms: clipping and noise, of the updates of clients at the server and of the gradients of samples at a client.

**DP-FedAvg** hides whether a client took part. Each client takes part with chance q, its update is cut to norm S, and
with N clients in all

    D = (sum of cut updates + N(0, (z_D S)^2)) / (q N)

(McMahan et al., arXiv:1710.06963). The norm S may follow the quantile gamma of the updates' norms: of the part b of
updates within S, known up to noise of deviation s_b on their number,

    S <- S exp(-lr (b - gamma)),   z_D = (z^-2 - (2 s_b)^-2)^(-1/2)

so that both together cost what noise z alone would (Andrew et al., arXiv:1905.03871, theorem 1).

**DP-SGD** hides each sample in its client's update.

    g = (sum over the batch of g_j min(1, C / |g_j|) + N(0, (z C)^2)) / B

g_j is the gradient of sample j, by `torch.func.vmap` of `grad`; the batch takes each sample with chance B / n (Abadi et
al., arXiv:1607.00133, algorithm 1).

**Noise** comes from the entropy of the operating system, or in a simulation from the run's seed:

    z = sqrt(-2 ln u) cos(2 pi v),   u and v uniform (Box and Muller 1958)

Only the first hides anything. Numbers are float64, rounded to the model's type after the sum; an attack by the rounding
of floating-point noise (Mironov, CCS 2012) is not ruled out, as it is by whole numbers.

**Distributed noise** under secure aggregation: each client adds whole numbers to its quantised update, the difference
of two Poisson numbers of mean lambda. Sums of such are of the same kind, so that clients need not know of each other:
where at least m of them are in a sum and each has 2 lambda = (z D2)^2 / m, its noise is at least that of multiplier z.
D2 is the norm of a clipped update in quantised units, C s + sqrt(numel) / 2 with what rounding adds. Poisson numbers
are drawn by transformed rejection (Hormann, Insurance: Mathematics and Economics 12, 1993, algorithm PTRS).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from shoal.data.sample import Tree, map_tree
from shoal.errors import ConfigError
from shoal.federated.config import PrivacyConfig
from shoal.federated.strategy import Update
from shoal.maths.counter import key_of, normal, uniform

Noise = Callable[[int], Tensor]
"""So many standard normal numbers, float64."""
Uniform = Callable[[int], Tensor]
"""So many numbers in (0, 1), float64."""
LEAST_MEAN = 10.0
"""Of Poisson numbers that transformed rejection draws."""


def uniform_from_entropy(numel: int) -> Tensor:
    """From `os.urandom`: 53 bits for each."""
    words = np.frombuffer(os.urandom(8 * numel), dtype=np.uint64)
    return torch.from_numpy(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def from_entropy(numel: int) -> Tensor:
    """Of uniform numbers from the entropy of the system."""
    u, v = uniform_from_entropy(2 * numel).view(2, numel)
    return (-2 * u.log()).sqrt() * (2 * math.pi * v).cos()


class Simulated:
    """The same numbers in every simulation of a run: draw after draw from the run's seed."""

    def __init__(self, seed: int, *names: str | int) -> None:
        self._seed, self._names, self._draw = seed, names, 0

    def __call__(self, numel: int) -> Tensor:
        self._draw += 1
        key = key_of(self._seed, "privacy", *self._names, self._draw)
        return normal(key, torch.arange(numel), dtype=torch.float64)


MEAN = "private mean"


def simulated_uniform(seed: int, *names: str | int) -> Uniform:
    """The same numbers in every simulation of a run: draw after draw from the run's seed."""
    draws = itertools.count()

    def draw(numel: int) -> Tensor:
        key = key_of(seed, "privacy", *names, next(draws))
        return uniform(key, torch.arange(numel), dtype=torch.float64)

    return draw


def skellam(numel: int, mean: float, source: Uniform) -> Tensor:
    """Differences of two Poisson numbers of this mean, at least `LEAST_MEAN`: int64 [numel]."""
    return poisson(numel, mean, source) - poisson(numel, mean, source)


def poisson(numel: int, mean: float, source: Uniform) -> Tensor:
    """Poisson numbers, int64 [numel]. Numbers that are rejected are drawn again."""
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    log_inverse = math.log(1.1239 + 1.1328 / (b - 3.4))
    squeeze = 0.9277 - 3.6224 / (b - 2)
    found, left = torch.empty(numel, dtype=torch.float64), torch.arange(numel)
    while left.numel():
        u, v = source(2 * left.numel()).view(2, -1)
        u = u - 0.5
        edge = 0.5 - u.abs()
        k = ((2 * a / edge + b) * u + mean + 0.43).floor()
        height = v.log() + log_inverse - (a / edge.square() + b).log()
        right = height <= k * math.log(mean) - mean - torch.lgamma(k.clamp(min=0) + 1)
        outside = (k < 0) | ((edge < 0.013) & (v > edge))
        taken = ((edge >= 0.07) & (v <= squeeze)) | (~outside & right)
        found[left[taken]] = k[taken]
        left = left[~taken]
    return found.long()


class PrivateMean:
    """Clips, sums, adds noise. `expected`: q N. `clip` is S, which moves where it is adaptive."""

    def __init__(self, config: PrivacyConfig, *, expected: float, noise: Noise) -> None:
        self.config, self.expected, self.clip, self._noise = config, expected, config.clip, noise
        if config.noise_by == "clients":
            self._noise = torch.zeros
        self.count_noise = config.count_noise or expected / 20
        self.multiplier = config.noise
        if config.adaptive:
            if 2 * self.count_noise <= config.noise:
                raise ConfigError(
                    f"privacy.count_noise = {self.count_noise:g} with privacy.noise = {config.noise:g}: it must be "
                    f"above {config.noise / 2:g}, or nothing is left for the update; raise it"
                )
            self.multiplier = (config.noise**-2 - (2 * self.count_noise) ** -2) ** -0.5

    def mean(self, updates: Sequence[Update], *, like: Tensor, version: int) -> Update:
        """One update in the place of all. `like` [numel] has the model's type; there may be no updates."""
        total = torch.zeros(like.numel(), dtype=torch.float64)
        within = 0
        for update in updates:
            norm = float(update.delta.double().norm())
            within += norm <= self.clip
            total.add_(update.delta.double(), alpha=min(1.0, self.clip / norm) if norm > 0 else 1.0)
        return self._noisy(total, within, len(updates), sum(u.samples for u in updates), like=like, version=version)

    def of_sum(self, update: Update, *, like: Tensor, version: int) -> Update:
        """The same for a mean of updates that their clients cut, of which the server knows nothing else."""
        total = update.delta.double() * update.contributors
        return self._noisy(total, 0, update.contributors, update.samples, like=like, version=version)

    def _noisy(self, total: Tensor, within: int, count: int, samples: int, *, like: Tensor, version: int) -> Update:
        total += self.multiplier * self.clip * self._noise(total.numel())
        if self.config.adaptive:
            part = (within + self.count_noise * float(self._noise(1))) / self.expected
            self.clip *= math.exp(-self.config.clip_lr * (part - self.config.quantile))
        delta = (total / self.expected).to(like.dtype)
        return Update(MEAN, version, max(1, samples), delta, contributors=max(1, count))


TOGETHER_BYTES = 1 << 28
"""Gradients of so many bytes are held at a time."""


class PrivateGradient:
    """Takes the place of the plain gradient in local training. `batch` is B."""

    def __init__(self, config: PrivacyConfig, *, batch: int, noise: Noise) -> None:
        self.config, self.batch, self.noise = config, batch, noise

    def __call__(
        self, loss: Callable[..., Any], model: Tensor, inputs: Tree, targets: Tree, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The private gradient [numel], and the mean loss, which never leaves the client."""

        def of_one(inputs: Tree, targets: Tree, weight: Tensor) -> tuple[Tensor, Tensor]:
            one, its_targets = (map_tree(lambda leaf: leaf[None], tree) for tree in (inputs, targets))
            gradient, value = grad_and_value(loss)(model, one, its_targets, weight[None])
            scale = (self.config.clip / gradient.norm().clamp(min=1e-12)).clamp(max=1.0)
            counts = (weight.sum() > 0).to(gradient.dtype)
            return gradient * scale * counts, value * counts

        total, losses = torch.zeros(model.numel(), dtype=torch.float64), torch.zeros(())
        rows = max(1, TOGETHER_BYTES // (model.numel() * model.element_size()))
        for first in range(0, len(weights), rows):
            part = slice(first, first + rows)
            x, y = (map_tree(lambda leaf, p=part: leaf[p], tree) for tree in (inputs, targets))
            gradients, values = vmap(of_one, randomness="different")(x, y, weights[part])
            total += gradients.double().sum(0)
            losses = losses + values.sum()
        total += self.config.noise * self.config.clip * self.noise(model.numel())
        real = (weights.flatten(1).sum(1) if weights.ndim > 1 else weights).count_nonzero().clamp(min=1)
        return (total / self.batch).to(model.dtype), losses / real
