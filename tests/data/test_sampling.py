"""`data.subset`, `data.weights` and `data.group_by_length`: which samples, how often, and beside which."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.assembly.sampling import sampled
from shoal.data.build import from_objects
from shoal.data.config import PythonData
from shoal.data.dataset import Dataset
from shoal.data.sampling import WINDOW, LengthOrder
from shoal.errors import ConfigError, UserCodeError


class Numbers:
    """Sample i is the number i, of class 0 or, one in ten, of class 1."""

    targets = tuple(int(i % 10 == 0) for i in range(200))

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.targets[index]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], str]:
    def name(function: Callable[[Any], Any]) -> str:
        module = ModuleType("choices")
        module.chooses = lambda data: function(data)  # type: ignore[attr-defined]
        monkeypatch.setitem(__import__("sys").modules, "choices", module)
        return "choices:chooses"

    return name


def opened(**keys: Any) -> Dataset:
    return sampled(PythonData(build="a:b", **keys), from_objects(Numbers()), seed=3)


def taken(data: Dataset, samples: int, *, step: int = 4) -> list[int]:
    ids = data.order(3, shuffle=True, step=step).ids(np.arange(samples))
    return [data.train[int(index)][0] for index in ids]


def test_a_share_is_drawn_once_and_trained_on_alone() -> None:
    data = opened(subset=0.25)
    first, second = taken(data, 50), taken(data, 100)[50:]
    assert len(set(first)) == 50
    assert sorted(first) == sorted(second)
    assert first != second
    assert taken(opened(subset=0.25), 50) == first


def test_a_function_names_samples(named: Callable) -> None:
    assert sorted(taken(opened(subset=named(lambda data: [7, 3, 199])), 3)) == [3, 7, 199]


def test_balanced_weights_draw_each_class_as_often() -> None:
    drawn = taken(opened(weights="balanced"), 4000)
    rare = sum(number % 10 == 0 for number in drawn)
    assert abs(rare - 2000) < 5 * np.sqrt(4000 / 4)


def test_balanced_weights_of_a_subset_are_of_its_classes(named: Callable) -> None:
    """Of 20 and 60 samples, each class half of the draws."""
    some = [*range(0, 200, 10), *[i for i in range(67) if i % 10]]
    drawn = taken(opened(subset=named(lambda data: some), weights="balanced"), 4000)
    assert abs(sum(number % 10 == 0 for number in drawn) - 2000) < 5 * np.sqrt(4000 / 4)


def test_weights_of_a_subset_are_those_of_its_samples(named: Callable) -> None:
    """The function sees all samples; only the weights of the subset's count."""
    data = opened(subset=0.5, weights=named(lambda data: np.arange(len(data))), draws=30)
    assert data.order(3, shuffle=True).samples == 30
    kept = set(taken(opened(subset=0.5), 100))
    drawn = taken(data, 3000)
    assert set(drawn) <= kept
    mean = np.mean(drawn)
    weights = np.array(sorted(kept))
    assert abs(mean - (weights**2).sum() / weights.sum()) < 5


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 700), step=st.integers(1, 9), seed=st.integers(0, 9), straddle=st.booleans())
def test_an_epoch_by_length_has_every_sample_once(samples: int, step: int, seed: int, straddle: bool) -> None:
    lengths = np.random.default_rng(seed).integers(1, 500, samples)
    order = LengthOrder(lengths, seed, step=step, straddle=straddle)
    epochs = order.ids(np.arange(3 * samples)).reshape(3, samples)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(samples))
    backwards = LengthOrder(lengths, seed, step=step, straddle=straddle).ids(np.arange(3 * samples)[::-1])
    assert backwards[::-1].tolist() == epochs.flatten().tolist()


def test_steps_hold_samples_of_like_length() -> None:
    """Padding falls from a third of the numbers to a few in a hundred; steps come in no order of length."""
    lengths = np.random.default_rng(0).integers(1, 500, 4096)

    def padding(ids: np.ndarray) -> float:
        steps = lengths[ids].reshape(-1, 8)
        return 1 - steps.sum() / (steps.max(1) * 8).sum()

    grouped = LengthOrder(lengths, 0, step=8).ids(np.arange(4096))
    assert padding(np.random.default_rng(1).permutation(4096)) > 0.4
    assert padding(grouped) < 0.03
    later = LengthOrder(lengths[:4093], 0, step=8, straddle=True).ids(np.arange(3 * 4093 // 8 * 8))
    assert padding(later) < 0.03
    means = lengths[grouped].reshape(-1, 8).mean(1)[:WINDOW]
    assert abs(np.corrcoef(np.arange(WINDOW), means)[0, 1]) < 0.4


@pytest.mark.parametrize(
    ("keys", "gives", "said"),
    [
        ({"subset": "choices:chooses"}, [1, 1], "give different whole numbers from 0 to 199"),
        ({"subset": "choices:chooses"}, [200], "give different whole numbers from 0 to 199"),
        ({"subset": "choices:chooses"}, [], "at least one"),
        ({"weights": "choices:chooses"}, [1.0], "there are 1 weights for 200 samples"),
        ({"weights": "choices:chooses"}, [-1.0] * 200, "finite and at least 0"),
        ({"group_by_length": "choices:chooses"}, ["long"], "one finite number for each"),
    ],
)
def test_what_functions_must_not_return(keys: dict, gives: list, said: str, named: Callable) -> None:
    named(lambda data: gives)
    with pytest.raises(UserCodeError, match=said):
        opened(**keys)


def test_an_iterable_has_no_samples_to_choose_among() -> None:
    with pytest.raises(ConfigError, match=r"data\.subset chooses among samples that are numbered"):
        sampled(PythonData(build="a:b", subset=0.5), from_objects(lambda: iter([(1, 1)])), seed=0)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"subset": 1.5}, "a share lies above 0 and below 1"),
        ({"subset": "half"}, "it names a function"),
        ({"weights": "balanced", "stratify": "targets"}, "each draw an order of their own"),
        ({"weights": "balanced", "shuffle": False}, "leave out shuffle and shuffle_window"),
        ({"draws": 3}, "there are none"),
    ],
)
def test_keys_that_contradict_each_other(keys: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PythonData(build="a:b", **keys)
