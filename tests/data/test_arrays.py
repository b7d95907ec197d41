"""Arrays are mapped, paired and never unpickled."""

from pathlib import Path

import numpy as np
import pytest

from shoal.data.arrays import Arrays
from shoal.errors import DataError


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array, allow_pickle=True)
    return path


def test_files_equal_memory(tmp_path: Path):
    """Mapped files give the samples of the arrays they were saved from, one by one and many at once."""
    inputs, targets = np.random.default_rng(0).random((5, 2, 3)), np.arange(5)
    memory = Arrays(inputs, targets)
    files = Arrays(saved(tmp_path / "i.npy", inputs), str(saved(tmp_path / "t.npy", targets)))
    assert isinstance(files.inputs, np.memmap)
    assert len(files) == len(memory) == 5
    assert np.array_equal(files[3][0], inputs[3])
    assert files[3][1] == 3
    ids = np.array([4, 0, 4])
    assert np.array_equal(files.samples_at(ids)[0], inputs[ids])
    assert memory.samples_at(ids)[1].tolist() == [4, 0, 4]


def test_bad_arrays_are_refused(tmp_path: Path):
    """Missing, empty, pickled, foreign, unequal: each has its sentence."""
    good = np.zeros(3)
    with pytest.raises(DataError, match="There is no file"):
        Arrays(tmp_path / "none.npy", good)
    with pytest.raises(DataError, match="at least one sample"):
        Arrays(good, np.zeros((0, 2)))
    with pytest.raises(DataError, match="at least one sample"):
        Arrays(np.array(1.0), good)
    with pytest.raises(DataError, match=r"no \.npy array"):
        Arrays(saved(tmp_path / "o.npy", np.array([object()])), good)
    (tmp_path / "empty.npy").touch()
    with pytest.raises(DataError, match=r"no \.npy array"):
        Arrays(tmp_path / "empty.npy", good)
    np.savez(tmp_path / "z.npz", a=good)
    with pytest.raises(DataError, match="several arrays"):
        Arrays(tmp_path / "z.npz", good)
    with pytest.raises(DataError, match="3 inputs and 4 targets"):
        Arrays(good, np.zeros(4))
