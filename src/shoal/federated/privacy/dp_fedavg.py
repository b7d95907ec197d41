"""DP-FedAvg: the model hides whether a client took part.

Each client takes part with chance q, its update is cut to norm S, and with N clients in all

    D = (sum of cut updates + N(0, (z_D S)^2)) / (q N)

(McMahan et al., arXiv:1710.06963). The norm S may follow the quantile gamma of the updates' norms: of the part b of
updates within S, known up to noise of deviation s_b on their number,

    S <- S exp(-lr (b - gamma)),   z_D = (z^-2 - (2 s_b)^-2)^(-1/2)

so that both together cost what noise z alone would (Andrew et al., arXiv:1905.03871, theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.federated.config import PrivacyConfig
from shoal.federated.privacy.noise import Noise
from shoal.federated.strategy import Update

MEAN = "private mean"


class PrivateMean:
    """Clips, sums, adds noise. `expected`: q N. `clip` is S, which moves where it is adaptive."""

    def __init__(self, config: PrivacyConfig, *, expected: float, noise: Noise) -> None:
        self.config, self.expected, self.clip, self._noise = config, expected, config.clip, noise
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
