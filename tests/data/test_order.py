"""The order is a permutation of every epoch, keyed, uniform enough, and free of memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.order import MOST_SAMPLES, Order, WholeSteps
from shoal.errors import DataError

FROZEN = [9, 4, 7, 5, 3, 2, 6, 1, 8, 0, 9, 5, 7, 2, 6, 3, 1, 8, 4, 0]
CHI_SQUARE_99_9 = 330.5  # 99.9th percentile with 255 degrees of freedom


def test_every_size_is_permuted():
    """Each epoch of each size from 1 to 300 holds every id exactly once."""
    for samples in range(1, 301):
        ids = Order(samples, seed=3).ids(np.arange(2 * samples))
        assert np.array_equal(np.sort(ids[:samples]), np.arange(samples))
        assert np.array_equal(np.sort(ids[samples:]), np.arange(samples))


@settings(max_examples=30, deadline=None)
@given(samples=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_any_seed_and_epoch_permute(samples: int, seed: int, epoch: int):
    """Whatever the seed and the epoch, an epoch's ids are a permutation."""
    ids = Order(samples, seed).ids(np.arange(epoch * samples, (epoch + 1) * samples))
    assert np.array_equal(np.sort(ids), np.arange(samples))


def test_positions_are_independent_of_their_company():
    """A position's id does not depend on which other positions are asked for, nor in what order."""
    order = Order(1000, seed=1)
    whole = order.ids(np.arange(3000))
    scattered = np.random.default_rng(0).permutation(3000)
    assert np.array_equal(order.ids(scattered), whole[scattered])
    assert order.ids(np.array([1234]))[0] == whole[1234]


def test_epochs_and_seeds_differ():
    """Another epoch and another seed give another order; equal ones the same."""
    positions = np.arange(1000)
    first = Order(1000, seed=1).ids(positions)
    assert np.array_equal(first, Order(1000, seed=1).ids(positions))
    assert np.mean(first == Order(1000, seed=1).ids(positions + 1000)) < 0.02
    assert np.mean(first == Order(1000, seed=2).ids(positions)) < 0.02
    assert np.mean(first == positions) < 0.02


@pytest.mark.parametrize("index", [0, 7, 15])
def test_an_index_is_uniform_over_epochs(index: int):
    """Over 4,096 epochs of 256 samples, an index meets each id about equally often (chi-square, fixed seed)."""
    epochs = 4096
    ids = Order(256, seed=11).ids(np.arange(epochs) * 256 + index)
    expected = epochs / 256
    counts = np.bincount(ids, minlength=256)
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_99_9


def test_neighbours_are_torn_apart():
    """Following ids differ by n/3 on average, as in a random permutation, to 5 %."""
    samples = 10_000
    ids = Order(samples, seed=5).ids(np.arange(samples))
    assert np.abs(np.diff(ids)).mean() == pytest.approx(samples / 3, rel=0.05)


@pytest.mark.parametrize("samples", [10**12, MOST_SAMPLES])
def test_huge_orders_cost_nothing(samples: int):
    """Orders of 10^12 and 2^62 samples answer at once, within range and without repeats."""
    ids = Order(samples, seed=0).ids(np.arange(samples - 500, samples + 500) if samples < 2**62 else np.arange(1000))
    assert ids.min() >= 0
    assert ids.max() < samples
    assert len(np.unique(ids)) >= 999  # two epochs may share an id by chance


def test_the_natural_order():
    """Without shuffling, ids count up and begin again."""
    assert Order(3, seed=9, shuffle=False).ids(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_refusals():
    """No samples is an error of the data; a negative position is one of the program."""
    with pytest.raises(DataError, match="0 samples"):
        Order(0, seed=1)
    with pytest.raises(ValueError, match="negative"):
        Order(5, seed=1).ids(np.array([-1]))


def test_the_order_is_frozen_in_time():
    """These ids are part of the contract with old checkpoints: a resumed run must meet the same order."""
    assert Order(10, seed=42).ids(np.arange(20)).tolist() == FROZEN


@given(samples=st.integers(1, 3000), window=st.integers(16, 500), seed=st.integers(0, 2**60))
def test_a_window_permutes_and_stays_local(samples: int, window: int, seed: int):
    """With a window each epoch is still a permutation, whatever is asked for first; an aligned stretch of 16 runs comes
    from 16 runs of neighbours, and one more where the last run is shorter."""
    order = Order(samples, seed, window=window)
    ids = order.ids(np.arange(3 * samples))
    for epoch in range(3):
        assert sorted(ids[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    backwards = np.arange(3 * samples)[::-1]
    assert (order.ids(backwards) == ids[::-1]).all()
    run = max(1, window // 16)
    for start in range(0, samples, 16 * run):
        stretch = ids[start : min(start + 16 * run, samples)]
        assert len(np.unique(stretch // run)) <= 17


def test_whole_steps_are_the_beginnings_of_epochs():
    """Of 10 samples 8 are kept: the first 8 of each epoch of the whole order, at positions without gaps."""
    order = Order(10, seed=3)
    kept = WholeSteps(order, 8)
    every = order.ids(np.arange(30)).reshape(3, 10)
    assert kept.ids(np.arange(24)).tolist() == every[:, :8].flatten().tolist()
    assert kept.epochs(np.array([0, 7, 8, 23])).tolist() == [0, 0, 1, 2]
    assert kept.samples == 10
