"""Aggregation that a few lying clients cannot steer: trimmed mean, median, Krum, geometric median.

    trimmed mean       of every number, without the b largest and the b smallest of n clients
    median             of every number (both: Yin et al., arXiv:1803.01498)
    Krum               the update whose n - f - 2 nearest others are nearest, f of n may lie (Blanchard et al. 2017);
                       multi-Krum averages the best few
    geometric median   argmin over z of sum of p_i |z - d_i|, by Weiszfeld's algorithm, smoothed (arXiv:1912.13445)

They need every update by itself, which secure aggregation does not give. Numbers are sorted block by block, so that the
working memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.errors import EnvironmentFault
from shoal.federated.config import GeometricMedianConfig, KrumConfig, TrimmedMeanConfig
from shoal.federated.strategy import Strategy, Update, weighted_sum

BLOCK_NUMEL = 1 << 20


class TrimmedMean(Strategy):
    """b = trim x n, rounded up: at least that part is left out at either end, and at least one update stays."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        assert isinstance(self.config, TrimmedMeanConfig)
        count = len(updates)
        cut = min(-int(-self.config.trim * count // 1), (count - 1) // 2)
        middle = _by_blocks(updates, lambda rows: rows.sort(0).values[cut : count - cut].mean(0))
        return model + self.config.server_lr * middle


class Median(Strategy):
    """Of an even number of clients, the mean of the two in the middle."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        low, high = (len(updates) - 1) // 2, len(updates) // 2

        def median(rows: Tensor) -> Tensor:
            ordered = rows.sort(0).values
            return (ordered[low] + ordered[high]) / 2

        return model + self.config.server_lr * _by_blocks(updates, median)


class Krum(Strategy):
    """Raises `EnvironmentFault` for a round with fewer than 2 f + 3 updates."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        assert isinstance(self.config, KrumConfig)
        least = 2 * self.config.malicious + 3
        if len(updates) < least:
            raise EnvironmentFault(
                f"{len(updates)} updates for Krum with {self.config.malicious} that may lie: it needs {least}; raise "
                "federated.least, or lower federated.malicious"
            )
        best = scores(updates, malicious=self.config.malicious).sort(stable=True).indices[: self.config.kept]
        chosen = [updates[index].delta for index in best.tolist()]
        return model + self.config.server_lr * weighted_sum(chosen, torch.full((len(chosen),), 1 / len(chosen)))


def scores(updates: Sequence[Update], *, malicious: int) -> Tensor:
    """For each update the sum of the squared distances to its n - f - 2 nearest others, float64 [updates]."""
    count = len(updates)
    squares = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(i):
            squares[i, j] = squares[j, i] = _distance(updates[i].delta, updates[j].delta) ** 2
    return squares.sort(1).values[:, 1 : count - malicious - 1].sum(1)


class GeometricMedian(Strategy):
    """Ends when a step moves the point by less than a millionth of its norm."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        assert isinstance(self.config, GeometricMedianConfig)
        shares, deltas = self.weights(updates), [update.delta for update in updates]
        point = weighted_sum(deltas, shares)
        for _ in range(self.config.iterations):
            distances = torch.tensor([_distance(point, delta) for delta in deltas], dtype=torch.float64)
            weights = shares / distances.clamp(min=self.config.smoothing)
            before, point = point, weighted_sum(deltas, weights / weights.sum())
            if _distance(point, before) <= 1e-6 * float(point.norm()):
                break
        return model + self.config.server_lr * point


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).double().norm())


def _by_blocks(updates: Sequence[Update], function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function` of the updates' numbers [updates, block], for every block of the model."""
    numel = updates[0].delta.numel()
    block = max(1, BLOCK_NUMEL // len(updates))
    parts = [
        function(torch.stack([update.delta[at : at + block] for update in updates])) for at in range(0, numel, block)
    ]
    return torch.cat(parts)
