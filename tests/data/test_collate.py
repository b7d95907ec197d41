"""Collating keeps values, pads lengths, and refuses what would depend on the company."""

import numpy as np
import pytest
import torch

from shoal.data.collate import collate, collate_stacked
from shoal.data.sample import Batch, parse_sample
from shoal.errors import UserCodeError


def batch_of(*samples: object, denominator: str = "auto") -> Batch:
    return collate(samples, np.arange(len(samples)), denominator=denominator)  # type: ignore[arg-type]


def test_numbers_arrays_and_tensors_stack():
    """Every kind of leaf gets a leading dim of samples and the documented dtype."""
    batch = batch_of((np.zeros(3), 1), (np.ones(3), 2))
    assert isinstance(batch.inputs, torch.Tensor)
    assert isinstance(batch.targets, torch.Tensor)
    assert batch.inputs.dtype == torch.float32
    assert batch.targets.tolist() == [1, 2]
    assert batch.targets.dtype == torch.int64
    assert batch.positions.tolist() == [0, 1]
    doubles = batch_of((torch.zeros(2, dtype=torch.float64), 1.5))
    assert doubles.inputs.dtype == torch.float64  # type: ignore[union-attr]
    assert doubles.targets.dtype == torch.float32  # type: ignore[union-attr]
    assert batch_of((np.array([65535], dtype=np.uint16), 0)).inputs.tolist() == [[65535]]  # type: ignore[union-attr]


def test_trees_keep_their_structure():
    """Tuples and dicts of inputs are stacked leaf by leaf; a mapping is a sample too."""
    sample = {"inputs": {"image": np.zeros((2, 2), np.float32), "pair": (1, 2.0)}, "targets": 3}
    inputs = batch_of(sample, sample).to("cpu").inputs
    assert isinstance(inputs, dict)
    assert inputs["image"].shape == (2, 2, 2)  # type: ignore[union-attr]
    assert [leaf.tolist() for leaf in inputs["pair"]] == [[1, 1], [2.0, 2.0]]  # type: ignore[union-attr]


def test_lengths_are_padded_on_the_right():
    """A shorter sample is followed by zeros of weight 0."""
    batch = batch_of((np.array([1, 2, 3]), np.array([2, 3, 4])), (np.array([5]), np.array([6])))
    assert batch.inputs.tolist() == [[1, 2, 3], [5, 0, 0]]  # type: ignore[union-attr]
    assert batch.targets.tolist() == [[2, 3, 4], [6, 0, 0]]  # type: ignore[union-attr]
    assert batch.weights.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_read_only_arrays_are_not_aliased():
    """A row of a read-only array is copied: writing to the batch cannot reach the file."""
    array = np.arange(4.0, dtype=np.float32)
    array.flags.writeable = False
    batch = collate_stacked((array, array), np.arange(4))
    batch.inputs.zero_()  # type: ignore[union-attr]
    assert array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("raw", "came"),
    [
        (None, "None"),
        ("text", "a str, 'text'"),
        (torch.zeros(3), "one Tensor of shape (3,)"),
        ([1, 2], "a list of 2"),
        ((1,), "a tuple of 1"),
        ((1, 2, 3, 4), "a tuple of 4"),
        ({"inputs": 1}, "['inputs']"),
        ({"inputs": 1, "targets": 2, "label": 3}, "'label'"),
        (("a", 1), "inputs is a str, 'a'"),
        ((1, None), "targets is None"),
        (((1, [2]), 1), "inputs[1] is a list of 1"),
        (({"x": object()}, 1), "inputs['x'] is an object"),
        ((np.array(["a"]), 1), "dtype <U1"),
        ((np.array([None]), 1), "dtype object"),
        ((1, 1, None), "weights is None"),
        ((1, 1, -1.0), "weights are not all finite"),
        ((1, 1, float("nan")), "weights are not all finite"),
        ((1, 1, (1, 2)), "one number, or one per position"),
        ((1, np.array([1, 2]), np.ones(3)), "weights have shape (3,)"),
    ],
)
def test_a_wrong_sample_is_described(raw: object, came: str):
    """What the data set returned is named in the refusal."""
    with pytest.raises(UserCodeError) as caught:
        parse_sample(raw)
    assert came in str(caught.value)


@pytest.mark.parametrize(
    "pair",
    [
        ((np.zeros((2, 3)), 1), (np.zeros((2, 4)), 1)),
        ((np.zeros(3), 1), (np.zeros((3, 1)), 1)),
        ((1, 1), (0.5, 1)),
        ((1, 1), ((1,), 1)),
        (((1,), 1), (1, 1)),
        (((1, 2), 1), ((1,), 1)),
        (({"a": 1}, 1), ({"b": 1}, 1)),
        ((1, 1, 1.0), (1, 1)),
        ((1, {"a": np.zeros(2)}), (1, {"a": np.zeros(3)})),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(pair: tuple):
    """Trailing dims, dtypes, structures and weights must agree, whichever sample comes first."""
    for samples in (pair, pair[::-1]):
        with pytest.raises(UserCodeError):
            batch_of(*samples)


def test_stacked_rows_are_counted():
    """A source that reads many at once must return one row for each id."""
    with pytest.raises(UserCodeError, match="for 3 ids"):
        collate_stacked((np.zeros((2, 1)), np.zeros(2)), np.arange(3))
    one = collate([(np.zeros(2), 1), (np.ones(2), 0)], np.arange(2))
    many = collate_stacked((np.array([[0.0, 0], [1, 1]]), np.array([1, 0])), np.arange(2))
    assert torch.equal(one.inputs, many.inputs)  # type: ignore[arg-type]
    assert torch.equal(one.weights, many.weights)
