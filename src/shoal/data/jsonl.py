"""JSON lines: one object in each line, which is a record of its keys.

The index marks the first line after every 64 KiB. A line is parsed when it is asked for, not when the index is made, so
a line that is no JSON is found when it is read. Lines of blanks are not counted, and a byte order mark is no part of
the first line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.data.blocks import BLOCK_BYTES
from shoal.errors import DataError

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
