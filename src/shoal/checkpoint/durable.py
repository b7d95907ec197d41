"""Changes to a disk that survive a crash, each between two labelled points.

A file is durable when it is fsynced, its name when its folder is. So: write under a temporary name, fsync, rename,
fsync the folder (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). `on_point` hears "LABEL.before"
and "LABEL.after" around every call that can be interrupted; tests kill the process there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
