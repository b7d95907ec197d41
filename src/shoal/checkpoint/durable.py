"""Changes to a disk that survive a crash, each between two labelled points.

A file is durable when it is fsynced, its name when its folder is. So: write under a temporary name, fsync, rename,
fsync the folder (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). `on_point` hears "LABEL.before"
and "LABEL.after" around every call that can be interrupted; tests kill the process there.

What went wrong in the background, as a sentence: what was found, what it means for the run, the repair.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import ShoalError

OnPoint = Callable[[str], None]

ACTIONS = (
    "object/write",
    "object/fsync",
    "object/rename",
    "objects/fsync",
    "object/verify",
    "manifest/write",
    "manifest/fsync",
    "folder/fsync",
    "commit/rename",
    "commit/fsync",
    "latest/write",
    "latest/fsync",
    "latest/rename",
    "pointer/fsync",
    "retention/rename",
    "retention/fsync",
    "retention/delete",
    "retention/sweep",
)
POINTS = tuple(f"{action}.{moment}" for action in ACTIONS for moment in ("before", "after"))
"""Every label that a save can pass, in order."""


def unheard(label: str) -> None:
    """The listener for those who do not listen."""


@contextmanager
def path_named(path: Path) -> Iterator[None]:
    """Calls on a file descriptor raise without a file name, and the name is what the user needs: add `path`."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


class Disk:
    """Durable file operations; each `OSError` names its path."""

    def __init__(self, on_point: OnPoint = unheard) -> None:
        self._on_point = on_point

    @contextmanager
    def point(self, action: str, path: Path) -> Iterator[None]:
        """One interruptible action on `path`."""
        self._on_point(f"{action}.before")
        with path_named(path):
            yield
        self._on_point(f"{action}.after")

    def write(self, path: Path, data: bytes | memoryview, *, kind: str) -> None:
        """Write `data` to `path` and fsync it; on failure nothing is left there."""
        try:
            self._write(path, memoryview(data), kind)
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def rename(self, source: Path, target: Path, *, action: str) -> None:
        """Give `source` the name `target`, atomically; a file of that name is replaced."""
        with self.point(action, target):
            os.replace(source, target)

    def sync_folder(self, path: Path, *, action: str) -> None:
        """Make the names inside `path` durable."""
        with self.point(action, path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, path: Path, *, action: str) -> None:
        """Delete the file `path` if it is there."""
        with self.point(action, path):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, data: memoryview, kind: str) -> None:
        with path_named(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            with self.point(f"{kind}/write", path):
                written = 0
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            with self.point(f"{kind}/fsync", path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def sentence(error: Exception, *, step: int, root: Path) -> str:
    """Why the checkpoint of `step` under `root` was not saved; training goes on, so the sentence must say it all."""
    return f"the checkpoint of step {step} was not saved, and the one before it stays: {_reason(error, root)}"


def sentence_after_commit(error: OSError, *, step: int, root: Path) -> str:
    """Why the end of a save did not succeed, though the checkpoint of `step` is there and counts."""
    found = _reason(error, root)
    return f"the checkpoint of step {step} is saved, but `latest` was not changed or older ones not deleted: {found}"


def _reason(error: Exception, root: Path) -> str:
    if isinstance(error, ShoalError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"a rank did not answer ({error}); look for a dead or stuck rank"
    if isinstance(error, OSError):
        where = error.filename or root
        return f"{where}: {error.strerror or error}; {_repair(error)}"
    return f"{type(error).__name__}: {error}; please report this as a defect of Shoal"


def _repair(error: OSError) -> str:
    if error.errno in _FULL:
        return "free space on that disk, or lower checkpoint.keep"
    if error.errno in _READ_ONLY:
        return "make the folder writable, or point run.directory to one that is"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f), or lower checkpoint.object_bytes"
    return "check the disk and its mount"
