"""The average does not see padding or how a batch is split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.collate import collate
from shoal.data.sample import Batch
from shoal.errors import UserCodeError

SPLIT_TOLERANCE = 1e-6  # weights are float32
DENOMINATORS = ["auto", "samples", "tokens", "weights"]


def batch_of(samples: list, denominator: str) -> Batch:
    return collate(samples, np.arange(len(samples)), denominator=denominator)  # type: ignore[arg-type]


def mean_loss(batches: list[Batch]) -> float:
    """A loss that depends on the target alone, averaged as the engine does; padding would add sin(0 + 1)."""
    total = sum(float((torch.sin(b.targets.double() + 1) * b.weights).sum()) for b in batches)  # type: ignore[union-attr]
    return total / sum(b.weight for b in batches)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=2, max_size=9),
    micro=st.integers(1, 9),
    denominator=st.sampled_from(DENOMINATORS),
    whole=st.booleans(),
)
def test_the_mean_is_that_of_any_split(lengths: list[int], micro: int, denominator: str, whole: bool):
    """Variable lengths in microbatches of any size give the mean of one batch, whatever it is taken over."""
    samples = []
    for number, length in enumerate(lengths):
        tokens = (np.arange(length) * 7 + number) % 11
        samples.append((tokens, tokens, 0.5 + number if whole else np.arange(1.0, length + 1)))
    split = [batch_of(samples[i : i + micro], denominator) for i in range(0, len(samples), micro)]
    assert mean_loss(split) == pytest.approx(mean_loss([batch_of(samples, denominator)]), rel=SPLIT_TOLERANCE)


def test_what_each_denominator_counts():
    """Of samples of 3 and 1 tokens: tokens count 4, samples 2, weights what the data set says."""
    pair = [(np.ones(3), np.array([1, 2, 3])), (np.ones(1), np.array([4]))]
    assert batch_of(pair, "tokens").weight == 4
    assert batch_of(pair, "auto").weight == 4
    assert batch_of(pair, "samples").weight == pytest.approx(2)
    assert batch_of(pair, "samples").weights[1].tolist() == [1, 0, 0]
    weighted = [(*pair[0], 3.0), (*pair[1], 0.5)]
    assert batch_of(weighted, "auto").weights.tolist() == [[1, 1, 1], [0.5, 0, 0]]
    assert batch_of(weighted, "tokens").weight == 4
    by_position = [(*pair[0], np.array([1, 0, 2])), (*pair[1], np.array([3]))]
    assert batch_of(by_position, "weights").weights.tolist() == [[1, 0, 2], [3, 0, 0]]


def test_classes_and_vectors_weigh_one_each():
    """Class targets and real vectors have one weight a sample, in every microbatch size."""
    assert batch_of([(1.0, 2), (1.0, 0)], "auto").weights.tolist() == [1, 1]
    assert batch_of([(1.0, np.zeros(3)), (1.0, np.ones(3))], "auto").weights.tolist() == [1, 1]
    assert batch_of([(1.0, np.zeros(3)), (1.0, np.ones(3))], "tokens").weights.shape == (2, 3)
    assert batch_of([(1.0, {"a": 1, "b": np.zeros(2)})] * 3, "auto").weights.tolist() == [1, 1, 1]
    masks = batch_of([(1.0, np.zeros((2, 4), np.int64))], "samples")
    assert masks.weights.shape == (1, 2, 4)
    assert masks.weight == pytest.approx(1)


def test_ignored_targets_weigh_nothing():
    """The target -100, which cross-entropy ignores, counts in no denominator."""
    samples = [(0.0, np.array([-100, 2, 3])), (0.0, np.array([-100, -100, -100]))]
    assert batch_of(samples, "tokens").weights.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch_of(samples, "samples").weights.tolist() == [[0, 0.5, 0.5], [0, 0, 0]]
    assert batch_of([(0.0, -100), (0.0, 1)], "auto").weights.tolist() == [0, 1]


def test_real_sequences_of_different_lengths_need_a_word():
    """Where padding of real targets would count, the user is asked; by tokens or weights it does not."""
    ragged = [(0.0, np.zeros((3, 2))), (0.0, np.zeros((1, 2)))]
    with pytest.raises(UserCodeError, match="'tokens'"):
        batch_of(ragged, "samples")
    assert batch_of(ragged, "tokens").weights.tolist() == [[1, 1, 1], [1, 0, 0]]
    weighted = [(*ragged[0], np.full(3, 2.0)), (*ragged[1], np.full(1, 5.0))]
    assert batch_of(weighted, "auto").weights.tolist() == [[2, 2, 2], [5, 0, 0]]


def test_missing_weights_and_trees_are_refused():
    """Weights that nobody gave, and tokens of several tensors, are errors with a repair."""
    with pytest.raises(UserCodeError, match="returns none"):
        batch_of([(1, 1)], "weights")
    with pytest.raises(UserCodeError, match="needs one tensor"):
        batch_of([(1, (1, 2))], "tokens")
