"""Folders of the cache that are made once, whichever of this machine's processes asks first.

A folder is written beside its place, synced, and renamed into it under a lock: any number of ranks may ask at once, and
a crash leaves nothing half-made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Returns when `folder` exists; where it does not yet, `make` fills a folder that is then given its name."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f".{folder.name}.lock"):
        if not folder.exists():
            _make(folder, make)


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    for abandoned in folder.parent.glob(f".{folder.name}-*"):  # by builders that were killed: the lock is ours
        shutil.rmtree(abandoned)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(building)
        for path in building.iterdir():
            _sync(path)
        building.chmod(0o755)
        _sync(building)
        os.replace(building, folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds an exclusive lock on `path` among all processes of this machine; a process that dies lets go of it.

    Without `wait`, raises BlockingIOError where another holds it.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
