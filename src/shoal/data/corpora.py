"""Text corpora: which files belong to one, which of them are held out, and the loss that a model has to beat.

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
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from shoal.errors import DataError


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`SHOAL_CACHE` of `environ` where it is set, else ~/.cache/shoal. Nothing is created."""
    if chosen := environ.get("SHOAL_CACHE"):
        return Path(chosen).expanduser()
    return Path.home() / ".cache" / "shoal"


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
