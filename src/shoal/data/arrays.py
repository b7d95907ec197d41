"""Inputs and targets as two arrays, in memory or mapped from .npy files; the first dim of both counts samples.

`digits` gives such arrays without a file: scikit-learn's 1,797 images of handwritten digits, 8 x 8 grey values. A fixed
fifth is held out: the images whose index has the smallest hashes, whatever the seed of the run.
Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from shoal.errors import DataError, MissingExtra
from shoal.files import open_file


class Arrays:
    """Sample i is (inputs[i], targets[i]). A path is opened read-only, without unpickling anything.

    Raises:
        DataError: a file is missing or no .npy array, an array is empty, or the two differ in length.
    """

    def __init__(self, inputs: np.ndarray | str | Path, targets: np.ndarray | str | Path) -> None:
        self.inputs = _opened(inputs, "inputs")
        self.targets = _opened(targets, "targets")
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"There are {len(self.inputs)} inputs and {len(self.targets)} targets: the first dims of both arrays "
                "count samples and must agree."
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[index], self.targets[index]

    def samples_at(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The samples `ids` (int64 [samples]) at once."""
        return self.inputs[ids], self.targets[ids]


def _opened(source: np.ndarray | str | Path, name: str) -> np.ndarray:
    array = source if isinstance(source, np.ndarray) else _mapped(Path(source), name)
    if array.ndim == 0 or len(array) == 0:
        where = "" if isinstance(source, np.ndarray) else f" in {source}"
        raise DataError(f"The array of {name}{where} has shape {array.shape}: it must hold at least one sample.")
    return array


def _mapped(path: Path, name: str) -> np.ndarray:
    try:
        with open_file(path, error=DataError, repair=f"correct the path of the {name}, or make it with numpy.save"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DataError:
        raise
    except Exception as error:  # numpy evaluates the header: a damaged one raises whatever Python's parser does
        raise DataError(
            f"{path} is no .npy array of numbers: write it with numpy.save, without objects in it."
        ) from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} holds several arrays: save the {name} alone, with numpy.save.")
    return array


HELD_OUT_FRACTION = 0.2
BRIGHTEST = 16.0


def digits() -> tuple[Arrays, Arrays]:
    """(train, held out): inputs float32 [1, 8, 8] in [0, 1], targets int64, the digit.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("scikit-learn", extra="vision", purpose="data.kind = 'digits'") from error
    images, labels = load_digits(return_X_y=True)
    inputs = (np.asarray(images) / BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8)
    targets = np.asarray(labels).astype(np.int64)
    order = np.array(sorted(range(len(targets)), key=_place))
    held_out, train = np.split(order, [round(HELD_OUT_FRACTION * len(order))])
    return Arrays(inputs[train], targets[train]), Arrays(inputs[held_out], targets[held_out])


def _place(index: int) -> bytes:
    return hashlib.blake2b(str(index).encode(), digest_size=8).digest()
