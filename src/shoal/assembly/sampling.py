"""Which samples of the data are trained on, how often, and beside which: `data.subset`, `weights`, `stratify`,
`group_by_length`.

The functions that these keys name are called with the whole training data, as it was built; of what they return for
each of its samples, that of the subset counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.assembly.user_code import call_named
from shoal.data.config import DataConfig
from shoal.data.dataset import Dataset
from shoal.data.inputs import AsInputs
from shoal.data.order import permuted
from shoal.data.record_config import Sampling
from shoal.data.sampling import Drawn, SampleSubset, lengths_of, strata_of
from shoal.errors import ConfigError, UserCodeError

Values = np.ndarray
BALANCED = "balanced"
"""Weights by which each class of the samples that are left is drawn as often."""


def sampled(config: DataConfig, data: Dataset, seed: int) -> Dataset:
    """`data` with what `config` says of its samples. Raises `ConfigError` where they have no number, `UserCodeError`
    for what the named functions return.
    """
    if config.stratify is not None:
        data = replace(data, strata=_strata(config.stratify, data))
    if not isinstance(config, Sampling):
        return data
    key = next((key for key in ("subset", "weights", "group_by_length") if getattr(config, key) is not None), None)
    if key is None:
        return data
    if data.endless or data.parts:
        raise ConfigError(f"data.{key} chooses among samples that are numbered, and this data's are not: leave it out")
    whole = _source_of(data)
    if config.group_by_length is not None:
        lengths = lengths_of(_named(config.group_by_length, whole, "data.group_by_length"), len(whole))
        data = replace(data, lengths=lengths)
    weights = None if config.weights in (None, BALANCED) else _weights(config.weights, whole)
    classes = strata_of(data.train) if config.weights == BALANCED else None
    if config.subset is not None:
        picked = SampleSubset(whole, _indices(config.subset, whole, seed))
        kept = {name: _cut(getattr(data, name), picked) for name in ("strata", "lengths")}
        weights, classes = _cut(weights, picked), _cut(classes, picked)
        facts = data.facts | {"train/samples": len(picked)}
        data = replace(_around(data, lambda _: picked), **kept, facts=facts)
    if classes is not None:
        weights = 1.0 / np.bincount(classes)[classes]
    if weights is not None:
        draws = config.draws or len(weights)
        data = _around(data, lambda source: Drawn(source, weights, draws, replacement=True))
    return data


def _source_of(data: Dataset) -> Any:
    return data.train.source if isinstance(data.train, AsInputs) else data.train


def _around(data: Dataset, wrap: Callable[[Any], Any]) -> Dataset:
    """`data` with `wrap` of its samples, which a script's own loop still gets as they are."""
    train = data.train
    return replace(data, train=train.reading(wrap(train.source)) if isinstance(train, AsInputs) else wrap(train))


def _cut(values: Values | None, picked: SampleSubset) -> Values | None:
    return None if values is None else values[picked.indices]


def _indices(subset: str | float, whole: Any, seed: int) -> Values:
    if isinstance(subset, str):
        return np.asarray(_named(subset, whole, "data.subset"))
    samples = len(whole)
    drawn = permuted(np.arange(samples, dtype=np.int64), samples, key=f"{seed}/subset")
    return np.sort(drawn[: max(1, round(subset * samples))])


def _weights(named: str, whole: Any) -> Values:
    values = _named(named, whole, "data.weights")
    try:
        return np.asarray(values, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserCodeError(f"data.weights: {error}; give one number for each sample") from error


def _strata(stratify: str, data: Dataset) -> Values:
    """The classes by which `data.stratify` orders the training samples."""
    if data.endless or data.parts:
        what = "a mixture has weights instead" if data.parts else "this data has no number of samples"
        raise ConfigError(f"data.stratify = {stratify!r} needs the class of each sample, and {what}; leave it out")
    named = stratify != "targets"
    return strata_of(data.train, _named(stratify, _source_of(data), "data.stratify") if named else None)


def _named(name: str, source: Any, key: str) -> Any:
    return call_named(name, {"data": source}, key=key)
