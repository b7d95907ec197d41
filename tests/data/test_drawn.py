"""Samplers of PyTorch as orders: the samples they say, from seed, epoch and position alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from shoal.data.sampling import Drawn, DrawnOrder, as_sampled
from shoal.errors import UserCodeError

DATA = list(range(100, 110))
WEIGHTS = [0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 5.0, 6.0, 7.0, 0.0]
SIX_SIGMA = 6.0


def order(sampler: Sampler, seed: int = 0) -> DrawnOrder:
    sampled = as_sampled(DATA, sampler)
    assert sampled is not None
    assert isinstance(sampled[0], Drawn)
    return DrawnOrder(sampled[0], seed)


def test_draws_with_replacement_are_in_proportion() -> None:
    """Of 200,000 draws each sample's share is its weight's, to six standard deviations; weight 0 is never drawn."""
    draws = 200_000
    ids = order(WeightedRandomSampler(WEIGHTS, 1000)).ids(np.arange(draws))
    shares = np.bincount(ids, minlength=10) / draws
    wanted = np.array(WEIGHTS) / sum(WEIGHTS)
    assert (np.abs(shares - wanted) <= SIX_SIGMA * np.sqrt(wanted * (1 - wanted) / draws)).all()


def test_draws_without_replacement_are_different_samples() -> None:
    """Five of seven in each epoch; the first of them in proportion to the weights."""
    drawn = order(WeightedRandomSampler(WEIGHTS, 5, replacement=False))
    epochs = 3_000
    firsts = np.array([drawn.ids(np.arange(5 * e, 5 * e + 5)) for e in range(epochs)])
    assert all(len(set(row)) == 5 for row in firsts.tolist())
    shares = np.bincount(firsts[:, 0], minlength=10) / epochs
    wanted = np.array(WEIGHTS) / sum(WEIGHTS)
    assert (np.abs(shares - wanted) <= SIX_SIGMA * np.sqrt(wanted * (1 - wanted) / epochs)).all()


@pytest.mark.parametrize("replacement", [True, False])
def test_a_position_says_its_sample_alone(replacement: bool) -> None:
    """One by one, backwards, in any cut: the same; another seed or epoch: another draw."""
    sampler = WeightedRandomSampler(WEIGHTS, 7, replacement=replacement)
    whole = order(sampler).ids(np.arange(70))
    again = order(sampler)
    assert [int(again.ids(np.array([p]))[0]) for p in reversed(range(70))] == whole.tolist()[::-1]
    assert not np.array_equal(order(sampler, seed=1).ids(np.arange(70)), whole)
    assert len({tuple(whole[k : k + 7]) for k in range(0, 70, 7)}) > 5
    assert again.epochs(np.array([0, 6, 7])).tolist() == [0, 0, 1]


def test_a_random_sampler_with_replacement_or_a_number_is_what_it_says() -> None:
    """It was once taken for a shuffle of all samples."""
    many = order(RandomSampler(DATA, replacement=True, num_samples=30))
    assert many.samples == 30
    assert len(set(many.ids(np.arange(30)).tolist())) < 30
    few = order(RandomSampler(DATA, num_samples=4))
    assert all(len(set(few.ids(np.arange(4 * e, 4 * e + 4)).tolist())) == 4 for e in range(9))


@pytest.mark.parametrize(
    ("sampler", "samples", "shuffle"),
    [
        (SequentialSampler(DATA), 10, False),
        (RandomSampler(DATA), 10, True),
        (SubsetRandomSampler([7, 1, 3]), 3, True),
        (DistributedSampler(DATA, num_replicas=3, rank=1), 10, True),  # type: ignore[arg-type]
        (DistributedSampler(DATA, num_replicas=3, rank=1, shuffle=False), 10, False),  # type: ignore[arg-type]
    ],
)
def test_the_others_are_a_source_and_a_shuffle(sampler: Sampler, samples: int, shuffle: bool) -> None:
    sampled = as_sampled(DATA, sampler)
    assert sampled is not None
    source, shuffles = sampled
    assert (len(source), shuffles) == (samples, shuffle)
    if isinstance(sampler, SubsetRandomSampler):
        assert [source[i] for i in range(3)] == [107, 101, 103]


class Own(RandomSampler):
    def __iter__(self) -> Any:
        return iter([0])


def test_nobody_guesses_what_a_sampler_of_ones_own_does() -> None:
    assert as_sampled(DATA, Own(DATA)) is None


@pytest.mark.parametrize(
    ("weights", "samples", "replacement"),
    [([1.0] * 9, 5, True), ([1.0] * 9 + [float("nan")], 5, True), ([0.0] * 10, 5, True), (WEIGHTS, 8, False)],
)
def test_weights_that_nothing_can_be_drawn_by_are_refused(
    weights: list[float], samples: int, replacement: bool
) -> None:
    with pytest.raises(UserCodeError, match=r"for 10 samples|different samples|weight above 0"):
        Drawn(DATA, np.array(weights), samples, replacement=replacement)


def test_draws_are_those_of_the_law_in_float64() -> None:
    """The naive version: the first edge above the uniform number."""
    sampler = WeightedRandomSampler(WEIGHTS, 50)
    drawn = order(sampler)
    numbers = drawn._uniform(0, np.arange(50))
    edges = np.cumsum(WEIGHTS) / sum(WEIGHTS)
    naive = [next(i for i, edge in enumerate(edges) if edge > u) for u in numbers]
    assert drawn.ids(np.arange(50)).tolist() == naive
    assert numbers.dtype == torch.zeros(0, dtype=torch.float64).numpy().dtype
