"""Mixtures keep exact proportions in every window, and pass through each source once in its own epochs."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.config import DataConfig
from shoal.data.dataset import MixtureOrder, quotas_of
from shoal.data.order import Order
from shoal.errors import DataError
from tests.data.sources import SAMPLES, built, number_of, written
from tests.data.test_sources import interrupted

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=60)
@given(sizes=SIZES, data=st.data(), seed=st.integers(0, 2**40))
def test_windows_hold_the_quotas_and_sources_their_epochs(sizes: list[int], data: st.DataObject, seed: int):
    """Each window has exactly the quotas; of each source, any whole number of its epochs holds every sample that often;
    asking for positions one by one, or in any order, gives the same."""
    quotas = [data.draw(st.integers(1, 9)) for _ in sizes]
    order = MixtureOrder([Order(size, seed + i) for i, size in enumerate(sizes)], quotas, seed)
    window = sum(quotas)
    windows = 2 * max(-(-size // quota) for size, quota in zip(sizes, quotas, strict=True))
    positions = np.arange(windows * window)
    ids, (sources, places) = order.ids(positions), order.places(positions)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    for source, (size, quota) in enumerate(zip(sizes, quotas, strict=True)):
        own = (ids >= starts[source]) & (ids < starts[source + 1])
        assert (own == (sources == source)).all()
        assert (own.reshape(windows, window).sum(axis=1) == quota).all()
        assert sorted(places[own]) == list(range(windows * quota))
        first_epoch = ids[own][order.epochs(positions)[own] == 0] - starts[source]
        assert sorted(first_epoch) == list(range(size))
    shuffled = np.random.default_rng(0).permutation(positions)
    assert (order.ids(shuffled) == ids[shuffled]).all()


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_quotas_are_the_weights_rounded(weights: list[float]):
    """They sum to the window, and none is a whole sample away from its share."""
    quotas = quotas_of(weights, 100_000)
    assert sum(quotas) == 100_000
    for quota, weight in zip(quotas, weights, strict=True):
        assert abs(quota - 100_000 * weight / sum(weights)) < 1


def test_a_source_without_a_sample_is_refused():
    """A weight too small for the window is said, with the source."""
    with pytest.raises(DataError, match=r"leaves source 1 of the mixture no sample.*raise data\.window"):
        quotas_of([1000, 1], 100)


def mixed(tmp_path: Path, **more) -> dict:
    return {
        "kind": "mixture",
        "sources": {kind: written(kind, tmp_path / kind) for kind in ("jsonl", "parquet")},
        "weights": {"jsonl": 3.0, "parquet": 1.0},
        "window": 8,
    } | more


def test_a_mixture_of_files_resumes_anywhere(tmp_path: Path):
    """Over ranks, readers and restarts the samples are those of the order; three of four are the first source's."""
    dataset = built(mixed(tmp_path), tmp_path / "cache")
    assert len(dataset.train) == 2 * SAMPLES
    used = interrupted(dataset, "jsonl")
    order = dataset.order(11, shuffle=True)
    ids = order.ids(np.arange(len(used)))
    assert used == (ids % SAMPLES).tolist()
    assert ((ids < SAMPLES).reshape(-1, 8).sum(axis=1) == 6).all()
    assert dataset.facts["jsonl/quota"] == 6
    assert number_of("jsonl", np.asarray(dataset.train[SAMPLES + 3]["inputs"])) == 3


def test_wrong_mixtures_are_refused(tmp_path: Path):
    """Weights for other sources, or not above 0; a mixture in a mixture; a source that fails is named."""
    for wrong in (
        {"weights": {"jsonl": 1.0}},
        {"weights": {"jsonl": 1.0, "parquet": 0.0}},
        {"sources": {"inner": {"kind": "mixture", "sources": {}}}, "weights": {}},
        {"sources": {}, "weights": {}},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(mixed(tmp_path, **wrong), DataConfig)
    sources = {"lost": {"kind": "jsonl", "files": ["/nowhere/*"], "inputs": "x", "targets": "y"}}
    with pytest.raises(DataError, match=r"data\.sources\.lost: "):
        built(mixed(tmp_path, sources=sources, weights={}), tmp_path / "cache")
