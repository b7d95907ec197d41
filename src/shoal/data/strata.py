"""Stratified order: every stretch of the run holds each class in its proportion, and an epoch every sample once.

Within an epoch, sample j of the n_c samples of class c, these in an order of the epoch's own, gets the key

    (j + u) / n_c,    u uniform in [0, 1), drawn for each sample

and the keys, sorted, are the epoch (stratified sampling of the positions of each class: W. G. Cochran, "Sampling
Techniques", 3rd ed., chapter 5). Of class c the first p samples of an epoch hold p n_c / N, to within 1 + C n_c / N for
C classes and N samples.

Like `Order`, it is a pure function of seed and position; unlike that, it keeps one epoch in memory, 8 bytes a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shoal.data.order import EpochInMemory, permuted
from shoal.data.sample import Source, describe
from shoal.errors import DataError, UserCodeError
from shoal.maths.counter import key_of, uniform

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
