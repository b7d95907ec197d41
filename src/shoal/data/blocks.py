"""Records of many files, found by number through an index of blocks.

A *block* is a stretch of neighbouring records that are read together: a row group of parquet, a record batch of Arrow,
64 KiB of lines or of small tar members. The index holds two integers for each block, its first record and its place in
the file, so it is about 1/4,000 of the data; records themselves are never listed. The index of a file is made once,
kept in the cache under the file's fingerprint, and read from there afterwards. Blocks that were read stay in memory up
to a limit, the last used ones; two readers that want the same block wait for one reading.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from shoal.data.shard_files import ShardFile, Store
from shoal.errors import DataError, EnvironmentFault
from shoal.remote_files import at_once

BLOCK_BYTES = 2**16
"""Neighbouring records of fewer bytes than this share a block, where the format leaves the choice."""
EVICTIONS = 20
"""How often a file may be dropped from a shared cache between its fetching and its reading."""
T = TypeVar("T")


class Block(Protocol):
    """Records that were read together."""

    nbytes: int

    def record(self, row: int) -> Mapping[str, Any]:
        """Record `row` of the block, by field. Raises DataError where it is damaged."""
        ...


class Format(Protocol):
    """A way to store records in a file."""

    name: str

    def index(self, path: Path) -> np.ndarray:
        """int64 [blocks + 1, 2]: the first record of each block and its place; last, the number of records and the end.

        Raises:
            DataError: the file is not of this format, or is damaged.
        """
        ...

    def read(self, path: Path, start: int, stop: int) -> Block:
        """The block between two places of the index. Raises DataError where it is damaged."""
        ...


class BlockFiles:
    """The records 0 .. len - 1 of `files`, one file after the other.

    Args:
        cache: the folder that keeps indexes.
        cache_bytes: memory for blocks that were read.

    Raises:
        DataError: a file is damaged, or all of them are empty.
    """

    def __init__(
        self, files: Sequence[ShardFile], file_format: Format, *, store: Store, cache: Path, cache_bytes: int
    ) -> None:
        self._files, self._format, self._store = tuple(files), file_format, store
        indexes = at_once(
            [partial(_index, file, file_format, store=store, cache=cache / "indexes") for file in files],
            threads=store.connections,
        )
        records = np.array([index[-1, 0] for index in indexes])
        self._records_before = np.concatenate([[0], np.cumsum(records)])
        self._blocks_before = np.concatenate([[0], np.cumsum([len(index) - 1 for index in indexes])])
        self._first = np.concatenate(
            [index[:-1, 0] + before for index, before in zip(indexes, self._records_before, strict=False)]
        )
        self._start = np.concatenate([index[:-1, 1] for index in indexes])
        self._stop = np.concatenate([index[1:, 1] for index in indexes])
        self._kept = _Kept(cache_bytes)
        if not len(self):
            raise DataError(f"There are no records in {files[0].name}{_and_others(files)}: give files that hold some.")

    def __len__(self) -> int:
        return int(self._records_before[-1])

    def record(self, index: int) -> Mapping[str, Any]:
        """Record `index` by field.

        Raises:
            DataError: it is damaged; the message names the file and the record in it, counted from 0.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        try:
            block = self._kept.get(number, self._read)
            return block.record(index - int(self._first[number]))
        except DataError as error:
            raise DataError(f"{self.where(index)}: {error}") from error

    def where(self, index: int) -> str:
        """The file of record `index` and its number there."""
        file = int(np.searchsorted(self._records_before, index, side="right")) - 1
        return f"{self._files[file].name}, record {index - int(self._records_before[file])}"

    @property
    def ahead_bytes(self) -> int:
        """See `records.Foresees`."""
        return self._store.ahead_bytes

    def needed(self, ids: np.ndarray) -> list[NeededFile]:
        """See `records.Foresees`: the files of the records `ids`."""
        numbers = np.searchsorted(self._records_before, ids, side="right") - 1
        return [NeededFile(self._store, self._files[number]) for number in dict.fromkeys(numbers.tolist())]

    def _read(self, number: int) -> Block:
        file = self._files[int(np.searchsorted(self._blocks_before, number, side="right")) - 1]
        start, stop = int(self._start[number]), int(self._stop[number])
        return _with_file(self._store, file, lambda path: self._format.read(path, start, stop))


def _with_file(store: Store, file: ShardFile, use: Callable[[Path], T]) -> T:
    """What `use` makes of the file, which is fetched again where others take its place in the cache meanwhile."""
    for _ in range(EVICTIONS):
        with suppress(FileNotFoundError):
            return use(store.path(file))
    raise EnvironmentFault(
        f"{file.name} was dropped from the cache {EVICTIONS} times before it could be read: raise "
        "data.remote_cache_bytes, or set data.shuffle_window."
    )


@dataclass(frozen=True)
class NeededFile:
    """A file that some records lie in. See `records.Needed`."""

    store: Store
    file: ShardFile

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.file.size_bytes

    def fetch(self) -> None:
        """See `Store.fetch_ahead`."""
        self.store.fetch_ahead(self.file)


def _and_others(files: Sequence[ShardFile]) -> str:
    return f" and {len(files) - 1} more files" if len(files) > 1 else ""


def _index(file: ShardFile, file_format: Format, *, store: Store, cache: Path) -> np.ndarray:
    """The file's index, from the cache where it is there."""
    kept = cache / f"{file_format.name}-{file.fingerprint}.npy"
    try:
        index = np.load(kept, allow_pickle=False)
    except (OSError, ValueError, EOFError):  # missing or damaged: it is made anew
        index = None
    if index is not None and index.dtype == np.int64 and index.ndim == 2 and index.shape[0] and index.shape[1] == 2:
        return index
    index = _with_file(store, file, file_format.index)
    cache.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=cache, prefix=f".{kept.name}-")
    with os.fdopen(descriptor, "wb") as target:
        np.save(target, index, allow_pickle=False)
    os.replace(name, kept)
    return index


class _Kept:
    """The blocks that were used last, up to a number of bytes, the newest one in any case."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._bytes = limit_bytes, 0
        self._blocks: OrderedDict[int, Future[Block]] = OrderedDict()
        self._lock = Lock()

    def get(self, number: int, read: Any) -> Block:
        with self._lock:
            future = self._blocks.get(number)
            mine = future is None
            if future is None:
                future = self._blocks[number] = Future()
            self._blocks.move_to_end(number)
        if not mine:
            return future.result()
        try:
            block = read(number)
        except BaseException as error:
            with self._lock:
                self._blocks.pop(number, None)
            future.set_exception(error)
            raise
        future.set_result(block)
        with self._lock:
            self._bytes += block.nbytes
            self._drop(number)
        return block

    def _drop(self, newest: int) -> None:
        for number, future in list(self._blocks.items()):
            if self._bytes <= self._limit_bytes:
                return
            if number != newest and future.done():
                del self._blocks[number]
                self._bytes -= future.result().nbytes


# JSON lines: one object in each line, which is a record of its keys.
#
# The index marks the first line after every 64 KiB. A line is parsed when it is asked for, not when the index is made,
# so a line that is no JSON is found when it is read. Lines of blanks are not counted, and a byte order mark is no part
# of the first line.


NEWLINE = 10
BLANKS = bytes(range(33))
"""Blank and control characters: a line of nothing else is empty."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
"""How files of gzip, zstd, bzip2 and xz begin."""
CHUNK_BYTES = 2**22


class JSONLines:
    """The format of .jsonl files. See `blocks.Format`."""

    name = "jsonl-2"

    def index(self, path: Path) -> np.ndarray:
        """See `blocks.Format.index`; a place is a byte of the file."""
        _refuse_compressed(path)
        marks: list[tuple[int, int]] = []
        lines, end = 0, 0
        for starts, stops in _lines(path):
            for_block = starts // BLOCK_BYTES
            fresh = np.flatnonzero(np.diff(for_block, prepend=marks[-1][1] // BLOCK_BYTES if marks else -1))
            marks += [(lines + int(at), int(starts[at])) for at in fresh]
            lines += len(starts)
            end = int(stops[-1])
        return np.array([*marks, (lines, end)], dtype=np.int64)

    def read(self, path: Path, start: int, stop: int) -> JSONBlock:
        """See `blocks.Format.read`."""
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) < stop - start:
            raise DataError("The file has become shorter: leave data alone while a run reads it.")
        return JSONBlock([line for line in content.split(b"\n") if line.strip(BLANKS)], stop - start)


class JSONBlock:
    """Neighbouring lines, not yet parsed."""

    def __init__(self, lines: list[bytes], nbytes: int) -> None:
        self.nbytes, self._lines = nbytes, lines

    def record(self, row: int) -> Mapping[str, Any]:
        """The object in line `row`. Raises DataError where it is none."""
        line = self._lines[row]
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"The line {_shown(line)} is no JSON ({error}): mend it, or skip bad records.") from error
        if not isinstance(record, dict):
            raise DataError(f"The line {_shown(line)} is no JSON object: write its fields in {{...}}.")
        return record


def _shown(line: bytes) -> str:
    return repr(line[:40].decode("utf-8", "backslashreplace")) + ("..." if len(line) > 40 else "")


def _refuse_compressed(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(max(map(len, COMPRESSED)))
    if head.startswith(COMPRESSED):
        raise DataError(f"{path} is compressed, so no line of it can be found without reading all: decompress it.")


def _lines(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Where lines that are not empty start and stop (exclusive, before the newline), in chunks of at least one line."""
    with path.open("rb") as file:
        marked = file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK
        offset = line_start = file.seek(len(BYTE_ORDER_MARK) if marked else 0)
        shown = 0  # characters that are not blank, of the line that has begun
        while chunk := file.read(CHUNK_BYTES):
            content = np.frombuffer(chunk, dtype=np.uint8)
            newlines = np.flatnonzero(content == NEWLINE)
            shown_before = shown + np.cumsum(content >= len(BLANKS))
            real = np.diff(shown_before[newlines], prepend=0) > 0
            if real.any():
                starts = np.concatenate([[line_start], offset + newlines + 1])[: len(newlines)]
                yield starts[real], (offset + newlines)[real]
            shown = int(shown_before[-1])
            if len(newlines):
                line_start = offset + int(newlines[-1]) + 1
                shown -= int(shown_before[newlines[-1]])
            offset += len(chunk)
    if shown:
        yield np.array([line_start]), np.array([offset])
