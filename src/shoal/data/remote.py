"""Files behind URLs, through fsspec (`https://`, `s3://`, `gs://`, `memory://`, ...), in a bounded cache on disk.

A file is fetched in parts, several at a time; what was fetched has to have the promised size. It is kept under its
fingerprint, so a new version of it is another file, and the files that were not used for longest go when the cache is
full. All processes of a machine share the cache: a lock lets one of them fetch.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shoal.data.shard_files import ShardFile, locked
from shoal.errors import DataError, EnvironmentFault
from shoal.remote_files import Attempts, at_once, missing, open_url

PART_BYTES = 2**23
PARTS_AT_ONCE = 4
AHEAD = 0.75
"""The share of the cache that is for files which the coming steps need; the rest holds those that were read."""
VERSIONS = ("ETag", "etag", "Last-Modified", "LastModified", "mtime", "updated", "created")
"""What file systems call the thing that changes with a file's content; the first that is there counts."""

T = TypeVar("T")


def is_remote(name: str) -> bool:
    """Whether `name` is a URL and not a path."""
    return "://" in name


class RemoteStore:
    """Files behind URLs. See `shard_files.Store`.

    Args:
        folder: the cache.
        limit_bytes: what the cache may hold, beside the files that are just being fetched.
        attempts: how often a failing request is made before EnvironmentFault is raised.
        options: keywords of the fsspec file system, such as an endpoint.
        sleep: waits so many seconds; for tests.
    """

    connections = 16

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        attempts: int = 8,
        options: Mapping[str, Any] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._options = dict(options or {})
        self.ahead_bytes = int(AHEAD * limit_bytes)
        self._attempts = Attempts(attempts, "data.remote_attempts", sleep)

    def listed(self, patterns: Sequence[str], *, key: str) -> list[ShardFile]:
        """The files that URLs and globs of URLs name, sorted.

        Raises:
            DataError: one is missing, larger than the cache, or its server does not tell its size.
            ConfigError, MissingExtra: the protocol is unknown, or its package is not installed.
        """
        names: set[str] = set()
        for pattern in patterns:
            found = [pattern]
            if any(sign in pattern for sign in "*["):
                file_system, path = self._open(pattern)
                matches = self._tried(lambda fs=file_system, p=path: fs.glob(p), pattern)
                found = [file_system.unstrip_protocol(name) for name in matches]
            if not found:
                raise DataError(f"{key} names {pattern!r}, and nothing matches it there: correct it.")
            names |= set(found)
        return at_once([partial(self._described, name) for name in sorted(names)], threads=self.connections)

    def path(self, file: ShardFile) -> Path:
        """The file in the cache, fetched if it is not there.

        Raises:
            EnvironmentFault: it cannot be fetched, or is no longer the file that was listed.
        """
        return self._in_cache(file, wait=True)

    def fetch_ahead(self, file: ShardFile) -> None:
        """See `Store.fetch_ahead`."""
        with suppress(BlockingIOError):
            self._in_cache(file, wait=False)

    def _in_cache(self, file: ShardFile, *, wait: bool) -> Path:
        kept = self._folder / f"{file.fingerprint}{Path(file.name).suffix[:16]}"
        if not _touched(kept):
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / f".{file.fingerprint}.lock", wait=wait):
                if not _touched(kept):
                    self._fetch(file, kept)
        return kept

    def _described(self, name: str) -> ShardFile:
        file_system, path = self._open(name)
        file_system.invalidate_cache(path)  # a kept listing would hide that a file has changed
        info = self._tried(lambda: file_system.info(path), name)
        size_bytes = info.get("size")
        if not isinstance(size_bytes, int):
            raise DataError(f"{name}: the server does not tell the file's size: serve it with Content-Length.")
        if size_bytes > self._limit_bytes:
            raise DataError(
                f"{name} has {size_bytes} bytes and data.remote_cache_bytes is {self._limit_bytes}: raise it, or cut "
                "the file into smaller ones."
            )
        return ShardFile(name, size_bytes, str(next((info[key] for key in VERSIONS if info.get(key)), "")))

    def _fetch(self, file: ShardFile, kept: Path) -> None:
        for abandoned in self._folder.glob(f".{kept.name}-*"):  # by processes that were killed: the lock is ours
            abandoned.unlink()
        descriptor, building = tempfile.mkstemp(dir=self._folder, prefix=f".{kept.name}-")
        os.close(descriptor)
        try:
            parts = [partial(self._fetch_part, file, building, at) for at in range(0, file.size_bytes, PART_BYTES)]
            at_once([partial(self._require_unchanged, file), *parts], threads=PARTS_AT_ONCE)
            self._require_unchanged(file)
            self._admit(building, kept, file.size_bytes)
        except BaseException:
            os.unlink(building)
            raise

    def _require_unchanged(self, file: ShardFile) -> None:
        if self._described(file.name) != file:
            raise EnvironmentFault(
                f"{file.name} has changed since the run listed it: leave data alone while a run reads it."
            )

    def _fetch_part(self, file: ShardFile, building: str, start: int) -> None:
        file_system, path = self._open(file.name)
        stop = min(start + PART_BYTES, file.size_bytes)
        content = self._tried(lambda: _part(file_system, path, start, stop, file.size_bytes), file.name)
        with open(building, "r+b") as target:  # opened by its name: after a failure, nothing is written anywhere else
            target.seek(start)
            target.write(content)

    def _admit(self, building: str, kept: Path, size_bytes: int) -> None:
        """Deletes the files that were used longest ago until there is room, and gives the new one its name.

        Who has a deleted file open goes on reading it.
        """
        with locked(self._folder / ".room.lock"):
            held = [(entry.stat(), entry.path) for entry in os.scandir(self._folder) if not entry.name.startswith(".")]
            held_bytes = sum(status.st_size for status, _ in held)
            for status, path in sorted(held, key=lambda entry: entry[0].st_mtime_ns):
                if held_bytes + size_bytes <= self._limit_bytes:
                    break
                held_bytes -= status.st_size
                os.unlink(path)
            os.replace(building, kept)

    def _tried(self, request: Callable[[], T], name: str) -> T:
        """What `request` returns, made again when it fails. Raises EnvironmentFault after the last attempt."""
        try:
            return self._attempts(request, name, answers=(FileNotFoundError, PermissionError))
        except (FileNotFoundError, PermissionError) as error:
            raise DataError(f"{name} is not there or not for us to read ({error}): correct data.files.") from error
        except ImportError as error:
            raise missing(name, error, purpose=f"reading {name}") from error

    def _open(self, name: str) -> tuple[Any, str]:
        return open_url(name, purpose=f"reading {name}", options=self._options)


def _touched(path: Path) -> bool:
    """Marks the file as used now; whether it is there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _part(file_system: Any, path: str, start: int, stop: int, size_bytes: int) -> bytes:
    content = file_system.cat_file(path, start=start, end=stop)
    if len(content) == size_bytes:  # a server that knows no ranges sends the whole file
        content = content[start:stop]
    if len(content) != stop - start:
        raise OSError(f"{len(content)} bytes came instead of {stop - start}")
    return content
