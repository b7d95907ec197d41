"""The stratified order: a permutation of every epoch that holds each class in its proportion everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.corpora import Arrays
from shoal.data.inputs import AsInputs
from shoal.data.order import Order, WholeSteps
from shoal.data.sampling import StratifiedOrder, strata_of
from shoal.errors import DataError, UserCodeError


def worst(ids: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Of each class, the largest distance of a prefix of an epoch from its proportion, in samples."""
    classes = np.unique(strata)
    counts = np.cumsum(strata[ids][:, None] == classes[None, :], axis=0)
    shares = np.array([(strata == one).mean() for one in classes])
    return np.abs(counts - np.arange(1, len(ids) + 1)[:, None] * shares).max(axis=0)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), seed=st.integers(-(2**70), 2**70))
def test_every_prefix_holds_each_class_in_its_proportion(sizes: list[int], seed: int) -> None:
    """To within 1 + C n_c / N, whatever the sizes; and each epoch has every sample once."""
    strata = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    samples, order = len(strata), StratifiedOrder(strata, seed)
    for epoch in (0, 1, 10**6):
        ids = order.ids(np.arange(epoch * samples, (epoch + 1) * samples))
        assert np.array_equal(np.sort(ids), np.arange(samples))
        assert (worst(ids, strata) <= 1 + len(sizes) * np.array(sizes) / samples).all()


def test_a_plain_order_is_not_stratified() -> None:
    """The bound has teeth: a rare class of a plain order leaves it."""
    strata = np.repeat([0, 1], [1000, 100])
    bound = 1 + 2 * np.array([1000, 100]) / 1100
    assert (worst(Order(1100, seed=0).ids(np.arange(1100)), strata) > bound).any()
    assert (worst(StratifiedOrder(strata, 0).ids(np.arange(1100)), strata) <= bound).all()


def test_positions_are_independent_of_their_company() -> None:
    """Also across epochs, and under whole steps; another seed and another epoch give another order."""
    strata = np.arange(500) % 7
    order = StratifiedOrder(strata, 3)
    whole = order.ids(np.arange(1500))
    scattered = np.random.default_rng(0).permutation(1500)
    assert np.array_equal(order.ids(scattered), whole[scattered])
    assert np.array_equal(order.epochs(scattered), scattered // 500)
    assert np.array_equal(WholeSteps(order, 400).ids(np.arange(400, 800)), whole[500:900])
    assert np.mean(whole[:500] == whole[500:1000]) < 0.05
    assert np.mean(whole[:500] == StratifiedOrder(strata, 4).ids(np.arange(500))) < 0.05


def test_samples_of_a_class_come_in_every_order() -> None:
    """Each member is equally often the first of its class (chi-square of 9 degrees of freedom at 99.9 %)."""
    order, first = StratifiedOrder(np.repeat([0, 1], [10, 5]), 1), np.zeros(10)
    for epoch in range(2000):
        ids = order.ids(np.arange(15 * epoch, 15 * epoch + 15))
        first[ids[ids < 10][0]] += 1
    assert ((first - 200) ** 2 / 200).sum() < 27.9


class Named:
    """Samples with targets as torchvision's data sets have them."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return float(index), 0


def test_the_classes_are_found() -> None:
    """In arrays, in attributes of a data set, behind what wraps it, and as text."""
    arrays = Arrays(np.zeros((4, 2)), np.array([3, 1, 3, 1]))
    for found in (arrays, Named([3, 1, 3, 1]), AsInputs(Named([3, 1, 3, 1]))):
        assert strata_of(found).tolist() == [1, 0, 1, 0]
    assert strata_of(arrays, ["cat", "dog", "cat", "eel"]).tolist() == [0, 1, 0, 2]


def test_what_gives_no_classes() -> None:
    """A sentence each."""
    with pytest.raises(DataError, match=r"has no attribute `targets`.*package.module:function"):
        strata_of([(1, 2)])
    for wrong in ([1, 2], [0.5, 1.5, 2.5, 3.5], [[1], [2], [3], [4]], [[1, 2], [3], [4], [5]], 7):
        with pytest.raises(UserCodeError, match=r"gives .* for 4 samples: it must be one number or text for each"):
            strata_of(Named([0] * 4), wrong)
    with pytest.raises(UserCodeError, match="the attribute `targets` of the training data gives"):
        strata_of(Named([0] * 3))
