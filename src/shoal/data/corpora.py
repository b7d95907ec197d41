"""Data that every machine has: the digits of scikit-learn, and text corpora: which files belong to one, which of them
are held out, and the loss that a model has to beat.

The standard library of the running interpreter is a corpus that every machine with Python has; its tests, which repeat
themselves, and generated files, which are tables, are left out. A file is held out of training when the hash of its
path falls below the wanted fraction, so that it stays on its side when other files come and go. The baseline is an
add-one-smoothed bigram model of bytes:

    p(b | a) = (count(a b) + 1) / (count(a) + 256),    loss = -mean of ln p over the held-out pairs, in nats per byte
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shoal.errors import DataError, MissingExtra
from shoal.files import open_file


def split_by_path(names: Iterable[str], fraction: float) -> tuple[list[str], list[str]]:
    """The names to train on and those held out, both sorted.

    With a fraction above 0 at least one name is held out: the one of the smallest hash, if none is below the fraction.

    Raises:
        DataError: nothing is left to train on.
    """
    names = sorted(names)
    held_out = [name for name in names if _place(name) < fraction]
    if fraction > 0 and names and not held_out:
        held_out = [min(names, key=_place)]
    train = sorted(set(names) - set(held_out))
    if not train:
        raise DataError(
            f"{len(names)} text files with data.held_out_fraction = {fraction} leave none to train on: give more "
            "files, or hold out less (0: nothing)."
        )
    return train, held_out


def _place(name: str) -> float:
    """Where in [0, 1) the hash of a path lies."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) / 2**48


LEFT_OUT_FOLDERS = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})
LEFT_OUT_FILES = re.compile(r"_sysconfigdata.*|encodings/(cp\d+|iso8859_\d+|mac_\w+|koi8_\w)\.py|pydoc_data/topics\.py")
GENERATED = re.compile(
    rb"auto(matically)?[- ]?generated|this (file|module) (is|was) generated|codec (\S+ )?generated from"
    rb"|^#.*generated (by|from)",
    re.IGNORECASE | re.MULTILINE,
)
HEAD_LINES = 12  # a generator signs at the top of its file; further down the words are prose
FEWEST_FILES = 100  # a whole library has several hundred; Debian's minimal Python has fewer than this


def stdlib_folder() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_sources(folder: Path, *, fewest: int = FEWEST_FILES) -> list[Path]:
    """The hand-written .py files of the library in `folder`, sorted.

    Raises:
        DataError: fewer than `fewest` are there.
    """
    sources = sorted(path for path in _python_files(folder) if not _is_left_out(path, folder))
    if len(sources) < fewest:
        raise DataError(
            f"{folder} holds {len(sources)} source files of the standard library, and at least {fewest} are wanted: "
            "install the full library (Debian: apt install libpython3-stdlib), or train on data.kind = 'text'."
        )
    return sources


def _python_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT_FOLDERS]
        found += [Path(parent, name) for name in files if name.endswith(".py")]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def _is_left_out(path: Path, folder: Path) -> bool:
    if LEFT_OUT_FILES.fullmatch(path.relative_to(folder).as_posix()):
        return True
    with path.open("rb") as file:
        head = b"".join(file.readline(1024) for _ in range(HEAD_LINES))
    return GENERATED.search(head) is not None


BYTES = 256
CHUNK_BYTES = 2**22  # pairs are counted in pieces, so that a large mapped file is never copied whole


def bigram_counts(text: np.ndarray) -> np.ndarray:
    """How often byte b follows byte a in `text` (uint8 [bytes]): int64 [256, 256], a first."""
    counts = np.zeros(BYTES * BYTES, dtype=np.int64)
    for start in range(0, len(text) - 1, CHUNK_BYTES):
        piece = np.asarray(text[start : start + CHUNK_BYTES + 1], dtype=np.int64)
        counts += np.bincount(piece[:-1] * BYTES + piece[1:], minlength=BYTES * BYTES)
    return counts.reshape(BYTES, BYTES)


def bigram_nats_per_byte(train: np.ndarray, held_out: np.ndarray) -> float:
    """The held-out loss of the model that `train` gives; both uint8 [bytes], `held_out` of two bytes at least.

    Raises:
        ValueError: there is no pair of bytes to score.
    """
    if len(held_out) < 2:
        raise ValueError(f"{len(held_out)} held-out bytes hold no pair: give two or more")
    counts = bigram_counts(train)
    log_p = np.log((counts + 1) / (counts.sum(axis=1, keepdims=True) + BYTES))
    scored = bigram_counts(held_out)
    return float(-(scored * log_p).sum() / scored.sum())


# Inputs and targets as two arrays, in memory or mapped from .npy files; the first dim of both counts samples.
#
# `digits` gives such arrays without a file: scikit-learn's 1,797 images of handwritten digits, 8 x 8 grey values. A
# fixed fifth is held out: the images whose index has the smallest hashes, whatever the seed of the run. Source: E.
# Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.


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
    order = np.array(sorted(range(len(targets)), key=_array_place))
    held_out, train = np.split(order, [round(HELD_OUT_FRACTION * len(order))])
    return Arrays(inputs[train], targets[train]), Arrays(inputs[held_out], targets[held_out])


def _array_place(index: int) -> bytes:
    return hashlib.blake2b(str(index).encode(), digest_size=8).digest()
