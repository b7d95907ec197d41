"""Inputs and targets as two arrays, in memory or mapped from .npy files; the first dim of both counts samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.errors import DataError


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
    if not path.is_file():
        raise DataError(f"There is no file {path} for the {name}: correct the path, or make it with numpy.save.")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            f"{path} is no .npy array of numbers ({error}): write it with numpy.save, without objects in it."
        ) from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} holds several arrays: save the {name} alone, with numpy.save.")
    return array
