"""Errors of reading name the sample, and keep the user's own exception."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from shoal.data.batches import read_batch
from shoal.data.collate import collate
from shoal.data.inputs import AsInputs, rows_of
from shoal.data.sample import Source, leaves
from shoal.errors import DataError, UserCodeError


class Faulty:
    """Raises at sample 3, returns nonsense at 4, exits at 5, and complains of its data at 6."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> object:
        if index == 3:
            raise KeyError("no such image")
        if index == 5:
            raise SystemExit(0)
        if index == 6:
            raise DataError("sample is torn")
        return None if index == 4 else (index, np.zeros(index))


class FaultyAtOnce(Faulty):
    def samples_at(self, ids: np.ndarray) -> object:
        raise OSError("disk gone")


def read(source: object, *ids: int) -> object:
    return read_batch(source, np.array(ids), 100 + np.arange(len(ids)), denominator="auto")  # type: ignore[arg-type]


def test_the_sample_is_named():
    """Id and position are in the message; the source's exception, with its traceback, is the cause."""
    with pytest.raises(UserCodeError, match="Sample 3 at position 101: the data source raised KeyError") as caught:
        read(Faulty(), 1, 3)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__ is not None
    with pytest.raises(UserCodeError, match="Sample 4 at position 100: The data set returned None"):
        read(Faulty(), 4)
    with pytest.raises(UserCodeError, match=r"one Tensor of shape \(3,\): .* TensorDataset\(a, b\) pairs inputs"):
        read([torch.zeros(3)], 0)
    with pytest.raises(UserCodeError, match="SystemExit"):
        read(Faulty(), 5)
    with pytest.raises(DataError, match="Sample 6 at position 100: sample is torn"):
        read(Faulty(), 6)


def test_the_batch_is_named():
    """What only shows between samples, or in reading them at once, names their ids and positions."""
    with pytest.raises(UserCodeError, match=r"Samples 1 \.\. 2 \(2 of them\) at positions 100 \.\. 101: The targets"):
        read(Faulty(), 1, 2)
    with pytest.raises(UserCodeError, match=r"Samples 1 \.\. 2 .* OSError: disk gone"):
        read(FaultyAtOnce(), 1, 2)


def in_tensors() -> dict[str, Source]:
    """Data sets whose rows can be taken at once."""
    x, tokens = torch.randn(9, 3, 2), torch.randint(50, (9, 5)).masked_fill_(torch.eye(9, 5) > 0, -100)
    classes, weights = torch.arange(9), torch.rand(9, 5)
    return {
        "classes": TensorDataset(x, classes),
        "tokens": TensorDataset(tokens, tokens),
        "weights": TensorDataset(x.requires_grad_(), tokens, weights),
        "weights of samples": TensorDataset(x, classes, classes),
        "channels last": TensorDataset(torch.randn(9, 3, 2, 2).to(memory_format=torch.channels_last), classes),
        "a part": Subset(TensorDataset(x, classes), torch.tensor([8, 1, 1, 0, 5, 2, 7])),  # pyright: ignore
        "a part of a part": Subset(Subset(TensorDataset(x, tokens), range(1, 9)), [7, 0, 3, 3, 6]),
        "inputs alone": AsInputs(TensorDataset(x, classes, tokens)),
        "one input": AsInputs(Subset(TensorDataset(classes), [4, 4, 8, 0, 1])),
    }


@pytest.mark.parametrize("kind", in_tensors())
def test_rows_of_tensors_are_read_at_once_as_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch, and no call for each sample."""
    source, ids, positions = in_tensors()[kind], np.array([3, 0, 4, 4]), np.array([7, 8, 9, 2])
    wanted = collate([source[index] for index in ids.tolist()], positions)
    monkeypatch.setattr(TensorDataset, "__getitem__", None)
    found = read_batch(source, ids, positions, denominator="auto").batch
    for ours, theirs in zip(leaves(found.inputs, found.targets), leaves(wanted.inputs, wanted.targets), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert ours.stride() == theirs.stride()
        assert not ours.requires_grad
    assert type(found.inputs) is type(wanted.inputs)
    torch.testing.assert_close((found.weights, found.positions), (wanted.weights, wanted.positions), rtol=0, atol=0)


def test_other_data_sets_are_read_sample_by_sample() -> None:
    """What a class of the user's does in `__getitem__` would be left out."""

    class Own(TensorDataset):
        def __getitem__(self, index: int) -> object:
            return tuple(2 * row for row in super().__getitem__(index))

    x = torch.ones(4, 2)
    for source in (Own(x, x), Subset(Own(x, x), [0, 1, 2])):
        assert rows_of(source) is None
        assert torch.equal(
            read_batch(source, np.array([1]), np.array([0]), denominator="auto").batch.targets, 2 * x[:1]
        )
    assert rows_of(TensorDataset(nn.Parameter(x))) is None
