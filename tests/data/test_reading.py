"""Errors of reading name the sample, and keep the user's own exception."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from shoal.data.batches import read_batch
from shoal.data.collate import collate
from shoal.data.inputs import AsInputs, rows_of, side_by_side
from shoal.data.sample import Batch, Source, leaves
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


def alike() -> dict[str, list[Any]]:
    """Items of one form."""
    x = torch.randn(3, 2, 4)
    arrays = [np.full((2, 2), number, dtype=np.uint8) for number in range(3)]
    return {
        "tensors": list(x),
        "half of them": list(x.bfloat16()),
        "with gradients": list(x.clone().requires_grad_()),
        "channels last": list(torch.randn(3, 3, 2, 2).to(memory_format=torch.channels_last)),
        "integers": [3, -(2**62), 5],
        "floats": [0.1, float("inf"), -1e-40],
        "booleans": [True, False, True],
        "arrays": arrays,
        "transposed arrays": [np.random.default_rng(number).random((2, 4, 3), np.float32).T for number in range(3)],
        "arrays by column": [np.asfortranarray(row.numpy()) for row in x],
        "reversed arrays": [row.numpy()[::-1] for row in x],
        "scalars of NumPy": [np.int64(3), np.int64(4), np.int64(5)],
        "pairs": [(row, number) for number, row in enumerate(x)],
        "mappings": [{"x": row, 7: (row[0], 1.5)} for row in x],
        "deep": [({"x": {"y": (row, True)}}, arrays[0]) for row in x],
        "one": [(x[0], 1)],
    }


def unlike() -> dict[str, list[Any]]:
    """Items that are read one by one."""
    x = torch.randn(3, 4)
    return {
        "kinds": [x[0], x[1].numpy(), x[2]],
        "wide integers": [1, 2, 2**63 - 1, 2**63],
        "wide floats": [np.zeros(2), np.ones(2)],
        "wide scalars": [np.float64(1.0), np.float64(2.0)],
        "other byte order": [np.zeros(2, dtype=">i8"), np.ones(2, dtype=">i8")],
        "texts": ["a", "b"],
        "nothing": [None, None],
        "nothing within": [(x[0], None), (x[1], None)],
        "subclasses": [nn.Parameter(x[0]), nn.Parameter(x[1])],
        "empty": [(), ()],
    }


@pytest.mark.parametrize("kind", alike())
def test_items_of_one_form_are_put_side_by_side_at_once_as_one_by_one(kind: str) -> None:
    """The same batch to the bit, in the same types, whether items are inputs alone or stand beside a target."""
    items = alike()[kind]
    ids = np.arange(len(items))
    assert side_by_side(items) is not None
    for source in (AsInputs(items), [(item, index) for index, item in enumerate(items)]):
        wanted = collate([source[index] for index in range(len(items))], ids)
        same(read_batch(source, ids, ids, denominator="auto").batch, wanted)


def test_the_samples_are_named_that_cannot_stand_side_by_side() -> None:
    """Also where PyTorch refuses it, as of tensors on two devices."""
    items = [torch.zeros(2), torch.zeros(2, device="meta"), torch.zeros(2)]
    for source in (AsInputs(items), [(item, 0) for item in items]):
        with pytest.raises(UserCodeError, match=r"Samples 0 \.\. 2 .* the data source raised"):
            read_batch(source, np.arange(3), np.arange(3), denominator="auto")


@pytest.mark.parametrize("kind", unlike())
def test_other_items_are_read_as_before(kind: str) -> None:
    """The same batch, or the same refusal."""
    items = unlike()[kind]
    ids, source = np.arange(len(items)), AsInputs(items)
    assert side_by_side(items) is None
    try:
        wanted = collate([source[index] for index in range(len(items))], ids)
    except UserCodeError as refusal:
        with pytest.raises(UserCodeError, match=re.escape(str(refusal))):
            read_batch(source, ids, ids, denominator="auto")
    else:
        same(read_batch(source, ids, ids, denominator="auto").batch, wanted)


@pytest.mark.parametrize(
    "items",
    [
        pytest.param([(torch.zeros(2), [1, 2]), (torch.zeros(2), [1, 2])], id="a list among targets"),
        pytest.param([[torch.zeros(2), 1], [torch.zeros(2), 1]], id="a list"),
        pytest.param([(torch.zeros(2), 1), (torch.zeros(3), 1, 1.0)], id="one with weights"),
        pytest.param([(torch.zeros(2), 1, -1.0), (torch.zeros(2), 1, 1.0)], id="a negative weight"),
        pytest.param([torch.zeros(2), torch.zeros(2)], id="no targets"),
    ],
)
def test_what_no_sample_may_be_is_refused_for_several_alike_too(items: list[Any]) -> None:
    """In the words of one."""
    ids = np.arange(2)
    with pytest.raises(UserCodeError) as refusal:
        collate(items, ids)
    with pytest.raises(UserCodeError, match=re.escape(str(refusal.value))):
        read_batch(items, ids, ids, denominator="auto")


def same(found: Batch, wanted: Batch) -> None:
    """To the bit, in structure and types too."""
    assert form(found.inputs) == form(wanted.inputs)
    assert form(found.targets) == form(wanted.targets)
    ours, theirs = ([*leaves(each.inputs, each.targets), each.weights, each.positions] for each in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride()
        assert not one.requires_grad


def form(tree: Any) -> Any:
    """The structure alone."""
    if isinstance(tree, dict):
        return {key: form(branch) for key, branch in tree.items()}
    return tuple(map(form, tree)) if isinstance(tree, tuple) else type(tree)
