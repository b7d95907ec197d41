"""Errors of reading name the sample, and keep the user's own exception."""

import numpy as np
import pytest

from shoal.data.batches import read_batch
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
