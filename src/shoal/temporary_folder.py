"""A temporary folder that the next start removes where this process cannot: after `kill -9`.

The owner holds a `flock` on the folder, which the kernel drops when the owner is gone, however it ends. So a folder of
ours that can be locked belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import EnvironmentFault

PREFIX = "shoal-run-"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder, until the end of the block; those that dead processes have left are removed first.

    Raises `EnvironmentFault` where none can be made.
    """
    try:
        base = Path(tempfile.gettempdir())
        _sweep(base)
        folder, fd = _made(base)
    except OSError as error:
        raise EnvironmentFault(
            f"no temporary folder can be made ({error}): ranks leave their last words there; set TMPDIR to a folder "
            "that can be written to"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _made(base: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        fd = _locked(folder)
        # Between the two lines another start may have taken the folder for a dead process's.
        if fd is not None and folder.is_dir():
            return folder, fd
        if fd is not None:
            os.close(fd)


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if folder.stat().st_uid == os.getuid() and (fd := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(fd)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where somebody else does, or the folder is gone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
