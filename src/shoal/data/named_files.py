"""The files that a `[data]` table names, and a hash of what is in each.

A file's hash is that of its content (BLAKE3), read once: while size, time of change and inode stay, the hash is taken
from the cache. A file behind a URL is not fetched for it: its hash is that of its size and of the version that its
server tells (an ETag). The standard library, the digits and the data of a user's function name no file.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from shoal.data.config import DataConfig, Mixture
from shoal.data.record_config import RecordFiles
from shoal.data.remote import RemoteStore, is_remote
from shoal.errors import DataError
from shoal.files import read_json

MOST_BYTES = 64 << 20
"""Of what is known of files: some hundred bytes each."""
_KEYS = {
    "text": ("files", "tokenizer"),
    "tokens": ("path", "held_out"),
    "arrays": ("inputs", "targets", "held_out_inputs", "held_out_targets"),
    "parquet": ("files", "held_out_files", "tokenizer"),
    "arrow": ("files", "held_out_files", "tokenizer"),
    "jsonl": ("files", "held_out_files", "tokenizer"),
    "webdataset": ("files", "held_out_files", "tokenizer"),
    "images": ("folder", "held_out_folder"),
    "datasets": ("folder", "tokenizer"),
}
"""The keys that name files or folders, by the kind of the table."""

Hashes = dict[str, str]


def patterns_of(config: DataConfig) -> dict[str, list[str]]:
    """Paths, globs and URLs by the key that names them, such as `data.files`."""
    if isinstance(config, Mixture):
        parts = ((name, patterns_of(source)) for name, source in config.sources.items())
        return {
            f"data.sources.{name}.{key.removeprefix('data.')}": found
            for name, part in parts
            for key, found in part.items()
        }
    table: dict[str, Any] = msgspec.to_builtins(config)
    named = {f"data.{key}": table.get(key) for key in _KEYS.get(table["kind"], ())}
    return {key: [value] if isinstance(value, str) else value for key, value in named.items() if value}


def local_files(config: DataConfig, folder: Path) -> dict[str, Path]:
    """The files of this machine that the table names, as they are named from `folder`; all those below a folder."""
    patterns = [one for found in patterns_of(config).values() for one in found if not is_remote(one)]
    return {name: folder / name for pattern in patterns for name in _matches(pattern, folder)}


def bytes_to_hash(config: DataConfig, folder: Path) -> int:
    """The bytes of all local files."""
    return sum(path.stat().st_size for path in local_files(config, folder).values())


def hashes(config: DataConfig, folder: Path, *, cache: Path) -> Hashes:
    """The hash of every file that the table names, by its name; `folder` is where relative names begin.

    Raises `OSError` where a file cannot be read, and what `RemoteStore.listed` raises.
    """
    known = _Known(cache / "data-hashes.json")
    found = {name: known.hash_of(path.resolve()) for name, path in sorted(local_files(config, folder).items())}
    known.save()
    return found | _remote(config, cache)


class _Known:
    """The hashes of files that were read before, and have not changed since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            kind = dict[str, tuple[str, str]]
            self._found = read_json(path, kind, limit_bytes=MOST_BYTES, error=DataError, repair="")
        except DataError:
            self._found = {}
        self._new: dict[str, tuple[str, str]] = {}

    def hash_of(self, path: Path) -> str:
        status = path.stat()
        state = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        before = self._found.get(str(path))
        if before is not None and before[0] == state:
            return before[1]
        content = blake3(max_threads=1)
        content.update_mmap(path)
        self._new[str(path)] = (state, content.hexdigest()[:32])
        return self._new[str(path)][1]

    def save(self) -> None:
        if not self._new:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(self._found | self._new))
        draft.replace(self._path)


def _remote(config: DataConfig, cache: Path) -> Hashes:
    sources = config.sources.values() if isinstance(config, Mixture) else [config]
    found: Hashes = {}
    for source in sources:
        if not isinstance(source, RecordFiles):
            continue
        urls = [one for one in (*source.files, *source.held_out_files) if is_remote(one)]
        if urls:
            store = RemoteStore(
                cache / "remote",
                limit_bytes=source.remote_cache_bytes,
                attempts=source.remote_attempts,
                options=source.remote_options,
            )
            found |= {file.name: file.fingerprint for file in store.listed(urls, key="data.files")}
    return found


def _matches(pattern: str, folder: Path) -> Iterator[str]:
    for name in glob.glob(os.path.expanduser(pattern), root_dir=folder, recursive=True):
        path = folder / name
        if path.is_file():
            yield name
        elif path.is_dir() and "*" not in pattern:
            yield from (os.path.join(name, str(one.relative_to(path))) for one in path.rglob("*") if one.is_file())
