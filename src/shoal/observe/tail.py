"""The new whole lines of a file that grows: each call of `Tail.lines` goes on where the last one ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 22
"""A longer line is damage: it is skipped, and not kept in memory."""


class Tail:
    """Follows one file. A file that is missing, unreadable or no regular file has no lines yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._rest = b""

    def lines(self, *, most_bytes: int = 1 << 62) -> Iterator[bytes]:
        """Whole lines since the last call, from about `most_bytes` bytes. A file that shrank is read from its start.

        A line without its end stays for the next call.
        """
        for chunk in self._chunks(most_bytes):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest = b""
            yield from whole

    def _chunks(self, most_bytes: int) -> Iterator[bytes]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if os.fstat(descriptor).st_size < self.offset:
                self.offset, self._rest = 0, b""
            while most_bytes > 0 and (chunk := os.pread(descriptor, min(CHUNK_BYTES, most_bytes), self.offset)):
                self.offset += len(chunk)
                most_bytes -= len(chunk)
                yield chunk
        except OSError:
            return
        finally:
            os.close(descriptor)
