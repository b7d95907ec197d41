"""The files of a data set, here or behind a URL: what a pattern names, and what has to be known of each.

A file is known by its name, its size and a version: the time of its last change, or what the remote store says instead
(an ETag). Indexes are kept under a hash of these three, so an edited file gets a new one.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.errors import DataError, EnvironmentFault
from shoal.files import make_durable


@dataclass(frozen=True)
class ShardFile:
    """One file: a path or a URL, its bytes, and what changes when its content does."""

    name: str
    size_bytes: int
    version: str

    @property
    def fingerprint(self) -> str:
        """A hash of name, size and version."""
        return hashlib.blake2b(f"{self.name}\0{self.size_bytes}\0{self.version}".encode(), digest_size=12).hexdigest()


class Store(Protocol):
    """Where files come from: `LocalStore`, or `RemoteStore` with its cache.

    `connections` files may be asked for at a time. `ahead_bytes` of files are worth fetching before a reader needs
    them; 0: none.
    """

    connections: int
    ahead_bytes: int

    def listed(self, patterns: Sequence[str], *, key: str) -> list[ShardFile]:
        """The files that the patterns name, sorted by name; `key` is the run file's, for messages."""
        ...

    def path(self, file: ShardFile) -> Path:
        """The file as one of this machine's, fetched if it has to be.

        Raises:
            EnvironmentFault: it cannot be fetched, or is no longer the file that was listed.
        """
        ...

    def fetch_ahead(self, file: ShardFile) -> None:
        """Brings the file nearer, unless another process is at it. Raises as `path`."""
        ...


class LocalStore:
    """Files of this machine."""

    connections, ahead_bytes = 1, 0

    def listed(self, patterns: Sequence[str], *, key: str) -> list[ShardFile]:
        """The files that paths and globs (** goes down folders) name, sorted.

        Raises:
            DataError: a pattern matches no file.
        """
        return [local_file(path) for path in globbed(patterns, key=key)]

    def path(self, file: ShardFile) -> Path:
        """The file itself.

        Raises:
            EnvironmentFault: it is no longer what it was when the data was opened.
        """
        path = Path(file.name)
        if local_file(path) != file:
            raise EnvironmentFault(
                f"{path} has changed since the run opened it: leave data alone while a run reads it."
            )
        return path

    def fetch_ahead(self, file: ShardFile) -> None:
        """Nothing: it is here."""


def local_file(path: Path) -> ShardFile:
    """What is known of a local file. Raises DataError where it is missing."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): put it back, or correct its name.") from error
    return ShardFile(str(path), status.st_size, str(status.st_mtime_ns))


def globbed(patterns: Sequence[str], *, key: str) -> list[Path]:
    """The files that `patterns` match, each once, sorted.

    Raises:
        DataError: a pattern matches no file; `key` is where it stood.
    """
    files: set[Path] = set()
    for pattern in patterns:
        found = {Path(name).resolve() for name in glob.glob(os.path.expanduser(pattern), recursive=True)}
        found = {path for path in found if path.is_file()}
        if not found:
            raise DataError(f"{key} names {pattern!r}, and no file matches it from {Path.cwd()}: correct it.")
        files |= found
    return sorted(files)


# Folders of the cache that are made once, whichever of this machine's processes asks first.
#
# A folder is written beside its place, synced, and renamed into it under a lock: any number of ranks may ask at once,
# and a crash leaves nothing half-made.


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
            make_durable(path)
        building.chmod(0o755)
        make_durable(building)
        os.replace(building, folder)
        make_durable(folder.parent)
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
