"""Orders of samples other than one permutation an epoch: drawn by weight, of a subset, stratified, of like lengths
together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler, Subset, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler as Weighted
from torch.utils.data.distributed import DistributedSampler

from shoal.data.order import EpochInMemory, permuted
from shoal.data.sample import Source, describe
from shoal.errors import DataError, UserCodeError
from shoal.maths.counter import key_of, uniform

# Samples drawn by weight, or some of them alone: what PyTorch's samplers say, as an order.
#
#     WeightedRandomSampler(w, n)                      n draws an epoch, sample i with probability w_i / sum of w
#     WeightedRandomSampler(w, n, replacement=False)   n different samples: those with the smallest keys -ln(u_i) / w_i
#     RandomSampler(replacement=True), num_samples=n   the same with equal weights
#     SubsetRandomSampler(indices)                     these samples, in an order of each epoch
#     data.weights, data.subset                        the first with n = len(w), and the last
#
# Keys of exponential variables draw without replacement one after the other in proportion to the weights that are left
# (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97, 2006).
#
# Like every order, it is a pure function of seed, epoch and position: world size and microbatches have no part in it,
# and a resumed run goes on in it. Draws are exact in float64.


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


# Stratified order: every stretch of the run holds each class in its proportion, and an epoch every sample once.
#
# Within an epoch, sample j of the n_c samples of class c, these in an order of the epoch's own, gets the key
#
#     (j + u) / n_c,    u uniform in [0, 1), drawn for each sample
#
# and the keys, sorted, are the epoch (stratified sampling of the positions of each class: W. G. Cochran, "Sampling
# Techniques", 3rd ed., chapter 5). Of class c the first p samples of an epoch hold p n_c / N, to within 1 + C n_c / N
# for C classes and N samples.
#
# Like `Order`, it is a pure function of seed and position; unlike that, it keeps one epoch in memory, 8 bytes a sample.


INSIDE = ("source", "records", "dataset")
"""Attributes by which a source that changes samples holds the one that it reads."""


class StratifiedOrder(EpochInMemory):
    """The order of samples of which sample i has the class `strata[i]` (int64 [samples])."""

    def __init__(self, strata: np.ndarray, seed: int) -> None:
        self.seed = seed
        by_class = np.argsort(strata, kind="stable")
        edges = np.flatnonzero(np.diff(strata[by_class])) + 1
        self._members = np.split(by_class, edges)

    @property
    def samples(self) -> int:
        """Samples of all classes."""
        return sum(map(len, self._members))

    def _drawn(self, epoch: int) -> np.ndarray:
        keys, ids = [], []
        for number, members in enumerate(self._members):
            count = len(members)
            places = np.arange(count, dtype=np.int64)
            name = f"{self.seed}/{epoch}/stratum {number}"
            ids.append(members[permuted(places, count, key=name)])
            drawn = uniform(key_of(self.seed, name), torch.from_numpy(places), dtype=torch.float64)
            keys.append((places + drawn.numpy()) / count)
        return np.concatenate(ids)[np.argsort(np.concatenate(keys), kind="stable")]


def strata_of(train: Source, classes: Any = None) -> np.ndarray:
    """The class of each sample of `train` as a number, int64 [samples].

    `classes`: one value for each sample, numbers or text; None: the attribute `targets` of the data set, as those of
    torchvision have it.

    Raises:
        DataError: the data set has no such attribute.
        UserCodeError: there is not one value for each sample.
    """
    where = "data.stratify" if classes is not None else "the attribute `targets` of the training data"
    values = _targets_of(train) if classes is None else classes
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):
        found = np.empty(0)
    if found.shape != (len(train),) or found.dtype.kind not in "biuSU":
        what = describe(values) if found.shape == (0,) else f"{found.dtype} {list(found.shape)}"
        raise UserCodeError(f"{where} gives {what} for {len(train)} samples: it must be one number or text for each")
    return np.unique(found, return_inverse=True)[1].astype(np.int64).reshape(-1)


def _targets_of(train: Any) -> Sequence[Any]:
    source: Any = train
    while source is not None:
        targets = getattr(source, "targets", None)
        if targets is not None and hasattr(targets, "__len__"):
            return targets
        source = next((inner for name in INSIDE if (inner := getattr(source, name, None)) is not None), None)
    raise DataError(
        'data.stratify = "targets": the training data has no attribute `targets` with the class of each sample; name a '
        "function of the data set that returns one for each, as package.module:function"
    )


# Samples of like length side by side, so that a step that pads to its longest sample pads little.
#
# Within an epoch the samples are permuted, and cut into windows of `WINDOW` steps. Each window is sorted by length and
# cut into steps; its steps are permuted, and the samples within each of them, so that no rank always gets the longest.
# Where a step goes on into the next epoch, that epoch begins with what completes it, of any lengths; so does a last
# step end that is shorter.
#
# A step of a window of S steps spans 1 / S of the lengths' distribution, whatever that is. Like every order, it is a
# pure function of seed and position, and of the samples of a step: a run keeps those. It keeps one epoch in memory, 8
# bytes a sample, and the lengths.


WINDOW = 64
"""Steps whose samples are sorted together."""


class LengthOrder(EpochInMemory):
    """The order of samples of which sample i has the length `lengths[i]`, in steps of `step` samples, which `straddle`
    the ends of epochs or not.
    """

    def __init__(self, lengths: np.ndarray, seed: int, *, step: int, straddle: bool = False) -> None:
        self._lengths, self._seed, self._step, self._straddle = lengths, seed, step, straddle

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return len(self._lengths)

    def _drawn(self, epoch: int) -> np.ndarray:
        key, samples, step = f"{self._seed}/{epoch}/lengths", self.samples, self._step
        ids = permuted(np.arange(samples, dtype=np.int64), samples, key=key)
        first = -epoch * samples % step if self._straddle else 0  # they complete the step before
        last = first + max(0, samples - first) // step * step
        whole = ids[first:last]
        numbers = np.arange(len(whole)) // step
        windows = numbers // WINDOW
        by_length = whole[np.lexsort((self._lengths[whole], windows))]
        of_steps, within = self._uniform(f"{key}/steps", -(-len(whole) // step)), self._uniform(key, len(whole))
        mixed = by_length[np.lexsort((within, of_steps[numbers], windows))]
        return np.concatenate([ids[:first], mixed, ids[last:]])

    def _uniform(self, key: str, count: int) -> np.ndarray:
        return uniform(key_of(self._seed, key), torch.arange(count), dtype=torch.float64).numpy()

    @property
    def digest(self) -> str:
        """Of the lengths and the steps that they are put into."""
        what = f"{self._step}/{self._straddle}/".encode() + np.ascontiguousarray(self._lengths).tobytes()
        return hashlib.blake2b(what, digest_size=8).hexdigest()


def lengths_of(values: object, samples: int) -> np.ndarray:
    """One length for each sample, float64 [samples]. Raises `UserCodeError` for anything else."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError, RuntimeError):
        found = np.empty(0)
    if found.shape != (samples,) or not np.isfinite(found).all():
        raise UserCodeError(
            f"data.group_by_length gives {list(found.shape)} for {samples} samples: it must be one finite number for "
            "each"
        )
    return found
