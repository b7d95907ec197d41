"""Image folders: a folder for each class, in it the images; classes are numbered in the order of their names. What
begins with a dot is neither (.ipynb_checkpoints, ._1.jpg).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.decode import IMAGE_SUFFIXES
from shoal.errors import DataError
from shoal.files import printable, read_file

MOST_BYTES = 2**30


class ImageFolder:
    """Records of `image` (the file's bytes) and `class` (its number), sorted by class and path.

    Paths are kept as one array of bytes and their ends: about 40 bytes for each image.

    Raises:
        DataError: the folder is missing or holds no images in folders, or lacks a class of `classes`.
    """

    def __init__(self, folder: str | Path, *, classes: tuple[str, ...] | None = None) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise DataError(f"There is no folder {self.folder}: correct data.folder.")
        found = sorted(
            entry.name for entry in os.scandir(self.folder) if entry.is_dir() and not entry.name.startswith(".")
        )
        self.classes = tuple(found) if classes is None else classes
        unknown = [name for name in found if name not in self.classes]
        if unknown:
            raise DataError(
                f"{self.folder} holds a class {unknown[0]!r} that the training images lack: give both the same folders."
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        paths, labels = [], []
        for name in found:
            inside = _images(self.folder / name)
            paths += [os.fsencode(path.relative_to(self.folder)) for path in inside]
            labels += [numbers[name]] * len(inside)
        if not paths:
            raise DataError(f"{self.folder} holds no images in folders: put those of each class into one folder there.")
        self._paths, self._ends = b"".join(paths), np.cumsum([len(path) for path in paths])
        self._labels = np.asarray(labels, dtype=np.int32)

    @property
    def targets(self) -> np.ndarray:
        """The class of each image, int32 [images]."""
        return self._labels

    def __len__(self) -> int:
        return len(self._ends)

    def record(self, index: int) -> Mapping[str, Any]:
        """The bytes of image `index` and its class. Raises DataError where the file cannot be read."""
        content = read_file(self._path(index), limit_bytes=MOST_BYTES, error=DataError, repair="put the image back")
        return {"image": content, "class": int(self._labels[index])}

    def where(self, index: int) -> str:
        """The image's path."""
        return printable(self._path(index))

    def _path(self, index: int) -> Path:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        return self.folder / os.fsdecode(self._paths[start : int(self._ends[index])])


def _images(folder: Path) -> list[Path]:
    """The images below `folder`, sorted."""
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES)
