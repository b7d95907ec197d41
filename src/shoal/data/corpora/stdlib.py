"""The standard library of this very interpreter as a corpus: real text that every machine with Python has.

Tests and generated files are left out: the first repeat themselves, the second are tables that no model should learn.
"""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

from shoal.errors import DataError

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
