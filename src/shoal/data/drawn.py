"""Samples drawn by weight, or some of them alone: what PyTorch's samplers say, as an order.

    WeightedRandomSampler(w, n)                      n draws an epoch, sample i with probability w_i / sum of w
    WeightedRandomSampler(w, n, replacement=False)   n different samples: those with the smallest keys -ln(u_i) / w_i
    RandomSampler(replacement=True), num_samples=n   the same with equal weights
    SubsetRandomSampler(indices)                     these samples, in an order of each epoch
    data.weights, data.subset                        the first with n = len(w), and the last

Keys of exponential variables draw without replacement one after the other in proportion to the weights that are left
(Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97, 2006).

Like every order, it is a pure function of seed, epoch and position: world size and microbatches have no part in it, and
a resumed run goes on in it. Draws are exact in float64.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler, Subset, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler as Weighted
from torch.utils.data.distributed import DistributedSampler

from shoal.errors import UserCodeError
from shoal.maths.counter import key_of, uniform


class SampleSubset:
    """The samples of `source` at `indices`, int64, in natural order.

    Raises `UserCodeError` for numbers that are none of samples, or that name one twice.
    """

    def __init__(self, source: Any, indices: Any) -> None:
        found = np.asarray(indices)
        whole = found.ndim == 1 and found.dtype.kind in "iu" and found.size > 0
        if not whole or found.min() < 0 or found.max() >= len(source) or len(np.unique(found)) != len(found):
            raise UserCodeError(
                f"data.subset names samples as {found.dtype} {list(found.shape)}: give different whole numbers from 0 "
                f"to {len(source) - 1}, at least one"
            )
        self.source, self.indices = source, found.astype(np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.source[int(self.indices[index])]

    @property
    def digest(self) -> str:
        """Of the numbers."""
        return hashlib.blake2b(self.indices.tobytes(), digest_size=8).hexdigest()


class Drawn:
    """`source`, of which an epoch draws `samples` by `weights`, one for each of its samples.

    Raises `UserCodeError` for weights that nothing can be drawn by.
    """

    def __init__(self, source: Any, weights: np.ndarray, samples: int, *, replacement: bool) -> None:
        self.source, self.weights, self.samples, self.replacement = source, weights, samples, replacement
        there = int((weights > 0).sum())
        if len(weights) != len(source) or not np.isfinite(weights).all() or (weights < 0).any():
            raise UserCodeError(
                f"there are {len(weights)} weights for {len(source)} samples: give one for each, finite and at least 0"
            )
        if not there or (not replacement and samples > there):
            raise UserCodeError(
                f"an epoch draws {samples} different samples, and {there} have a weight above 0: draw fewer, or with "
                "replacement"
            )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.source[index % len(self.source)]

    @property
    def digest(self) -> str:
        """Of the weights and how they are drawn by."""
        what = f"{self.samples}/{self.replacement}/".encode() + self.weights.tobytes()
        return hashlib.blake2b(what, digest_size=8).hexdigest()


class DrawnOrder:
    """The samples of `drawn` in every epoch, drawn from `seed`. Keeps one epoch without replacement in memory."""

    def __init__(self, drawn: Drawn, seed: int) -> None:
        self._drawn, self._seed = drawn, seed
        self._edges = np.cumsum(drawn.weights) / drawn.weights.sum()
        self._epoch: tuple[int, np.ndarray] | None = None

    @property
    def samples(self) -> int:
        """Draws of an epoch."""
        return self._drawn.samples

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at global positions, int64 of the shape of `positions` (int64, none negative)."""
        epochs, indices = np.divmod(np.asarray(positions, dtype=np.int64), self.samples)
        ids = np.empty_like(indices)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = self._at(int(epoch), indices[here])
        return ids

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epoch in which each position falls, int64."""
        return np.asarray(positions, dtype=np.int64) // self.samples

    def _at(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        if self._drawn.replacement:
            last = int(np.flatnonzero(self._drawn.weights)[-1])
            found = np.searchsorted(self._edges, self._uniform(epoch, indices), side="right")
            return np.minimum(found, last)  # the last edge may be a rounding below 1
        kept = self._epoch
        if kept is None or kept[0] != epoch:
            kept = self._epoch = epoch, self._without_replacement(epoch)
        return kept[1][indices]

    def _without_replacement(self, epoch: int) -> np.ndarray:
        drawn = self._uniform(epoch, np.arange(len(self._drawn.weights)))
        with np.errstate(divide="ignore", invalid="ignore"):
            keys = np.where(self._drawn.weights > 0, -np.log1p(-drawn) / self._drawn.weights, np.inf)
        return np.argsort(keys, kind="stable")[: self.samples]

    def _uniform(self, epoch: int, places: np.ndarray) -> np.ndarray:
        key = key_of(self._seed, f"drawn/{epoch}")
        return uniform(key, torch.from_numpy(np.ascontiguousarray(places)), dtype=torch.float64).numpy()


def as_sampled(source: Any, sampler: Any) -> tuple[Any, bool] | None:
    """The source that `sampler` draws from as it says, and whether each epoch has an order of its own; None: nobody can
    know what it does. Of a DistributedSampler its order alone counts: Shoal divides samples among ranks.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return source, False
    if isinstance(sampler, DistributedSampler) and kind is DistributedSampler:
        return source, bool(sampler.shuffle)
    if isinstance(sampler, SubsetRandomSampler) and kind is SubsetRandomSampler:
        return Subset(source, list(map(int, sampler.indices))), True
    if isinstance(sampler, Weighted) and kind is Weighted:
        weights = np.asarray(sampler.weights, dtype=np.float64)
        return Drawn(source, weights, int(sampler.num_samples), replacement=bool(sampler.replacement)), True
    if not isinstance(sampler, RandomSampler) or kind is not RandomSampler:
        return None
    if not sampler.replacement and sampler.num_samples == len(source):
        return source, True
    return Drawn(source, np.ones(len(source)), sampler.num_samples, replacement=sampler.replacement), True
