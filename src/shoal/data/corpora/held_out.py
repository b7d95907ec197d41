"""Which files of a corpus are held out of training: those whose path hashes below the wanted fraction.

A file's side depends on its own name alone, so that it stays there when other files come and go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from shoal.errors import DataError


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
