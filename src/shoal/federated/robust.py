"""Against clients that lie or fail: aggregation that a few of them cannot steer, and what is looked at before.

    trimmed mean       of every number, without the b largest and the b smallest of n clients
    median             of every number (both: Yin et al., arXiv:1803.01498)
    Krum               the update whose n - f - 2 nearest others are nearest, f of n may lie (Blanchard et al. 2017);
                       multi-Krum averages the best few
    geometric median   argmin over z of sum of p_i |z - d_i|, by Weiszfeld's algorithm, smoothed (arXiv:1912.13445)

They need every update by itself, which secure aggregation does not give. Numbers are sorted block by block, so that the
working memory does not grow with the model. `refusal` looks at the form of an update, its numbers and its size before
it counts, and names the client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.codec.kernels import kernels_for
from shoal.errors import EnvironmentFault
from shoal.federated.config import FederatedConfig, GeometricMedianConfig, KrumConfig, TrimmedMeanConfig
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


KERNEL_NUMEL = 1 << 16
MOST_SAMPLES = 1 << 40
MOST_STEPS = 1 << 30


def refusal(update: Update, config: FederatedConfig, *, numel: int) -> str | None:
    """One sentence if the update cannot count; None if it can."""
    who = f"client {update.client}"
    if not 1 <= update.samples <= MOST_SAMPLES or not 1 <= update.steps <= MOST_STEPS:
        return f"{who} says that it took {update.steps} steps over {update.samples} samples: both are at least 1"
    if not 0 <= update.momentum < 1:
        return f"{who} says that its momentum is {update.momentum:g}: it is from 0 up to but not 1"
    if not 0 <= update.cluster < config.models:
        return f"{who} says that it trained model {update.cluster + 1}: there are {config.models}"
    vectors = {"update": update.delta, "control": update.control}
    if (update.control is not None) != config.sends_control:
        return f"{who} sent {'a' if update.control is not None else 'no'} control: {config.variant} asks otherwise"
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != (numel,) or not vector.is_floating_point():
            return f"{who} sent an {name} of shape {list(vector.shape)}: the model has {numel} numbers"
        if not _is_finite(vector):
            return f"the {name} of {who} is not finite: its training diverged; lower optimizer.lr there"
    if config.largest_norm is not None:
        norm = float(torch.linalg.vector_norm(update.delta, dtype=torch.float64))
        if norm > config.largest_norm:
            return (
                f"the update of {who} has norm {norm:.3g}, and federated.largest_norm is {config.largest_norm:g}: it "
                "is poisoned, or the bound is too low"
            )
    return None


def _is_finite(vector: Tensor) -> bool:
    """One pass over the vector, by a kernel where there is one and it pays."""
    kernels = kernels_for(vector) if vector.numel() >= KERNEL_NUMEL else None
    if kernels is not None:
        return math.isfinite(kernels.largest(vector))
    return bool(torch.isfinite(torch.linalg.vector_norm(vector, ord=torch.inf)))
