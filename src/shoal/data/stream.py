"""JSON lines without end: a file that grows, and the lines of a socket, kept in such a file.

Line i is sample i, so the run's cursor, which counts positions, is the offset in the stream. A file keeps its lines,
and each is used in exactly one committed step. A socket gives them *at least* once: its lines are appended to the file;
after a break the receiver tells the sender how many whole lines it holds, `{"from": n}`, and the sender goes on from
there. One that cannot begins where it likes, and what it sends twice is trained on twice.
"""

from __future__ import annotations

import bisect
import fcntl
import os
import socket
import time
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import msgspec

from shoal.data.blocks import BLOCK_BYTES
from shoal.data.dataset import Dataset, Surroundings
from shoal.data.jsonl import JSONBlock
from shoal.data.order import MOST_SAMPLES
from shoal.data.record_config import Stream
from shoal.data.records import Fields
from shoal.errors import DataError

POLL_S = 0.02
CHUNK_BYTES = 2**20
RECONNECT_S = 0.5
CONNECT_TIMEOUT_S = 30.0


def build_stream(config: Stream, around: Surroundings) -> Dataset:
    """The stream that `config` names, without an end and with nothing held out."""
    path = Path(config.path).expanduser()
    fields = Fields(config.inputs, config.targets, config.weights)
    receiver = None if config.socket is None else Receiver(config.socket, path)
    lines = GrowingFile(path, patience_s=config.patience_s, receiver=receiver)
    source = StreamSamples(lines, fields, skips_bad=config.bad_records == "skip")
    return Dataset(source, endless=True, facts={"stream": config.socket or str(path)})


class GrowingFile:
    """The lines of a file that others append to; empty lines count, so that a line's number never changes.

    Of the lines' places only every 64 KiB one is kept.
    """

    def __init__(self, path: Path, *, patience_s: float, receiver: Receiver | None = None) -> None:
        self.path, self._patience_s, self._receiver = path, patience_s, receiver
        self._lock = Lock()
        self._marks: list[tuple[int, int]] = [(0, 0)]
        self._lines, self._whole_bytes = 0, 0

    def line(self, index: int) -> bytes:
        """Line `index` without its newline, waiting for it where it is not there yet.

        Raises:
            DataError: it does not come in time, or the file has become shorter.
        """
        self._wait_for(index)
        with self._lock:
            number = bisect.bisect_right(self._marks, (index, MOST_SAMPLES)) - 1
            first, start = self._marks[number]
            stop = self._marks[number + 1][1] if number + 1 < len(self._marks) else self._whole_bytes
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start).split(b"\n")[index - first]

    def _wait_for(self, index: int) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            with self._lock:
                before = self._lines
                if index >= self._lines:
                    self._scan()
                if index < self._lines:
                    return
                if self._lines > before:
                    deadline_s = time.monotonic() + self._patience_s
            if self._receiver is not None:
                self._receiver.start()
            if time.monotonic() > deadline_s:
                why = "" if self._receiver is None or not self._receiver.trouble else f" ({self._receiver.trouble})"
                raise DataError(
                    f"{self.path} has {self._lines} lines, and none came for {self._patience_s:g} s{why}: see to who "
                    "writes it, or raise data.patience_s."
                )
            time.sleep(POLL_S)

    def _scan(self) -> None:
        """Counts the whole lines that were appended. What follows the last newline may still be cut off and replaced:
        it is looked at anew each time."""
        size_bytes = self.path.stat().st_size if self.path.exists() else 0
        if size_bytes < self._whole_bytes:
            raise DataError(
                f"{self.path} has {size_bytes} bytes after it had lines in {self._whole_bytes}: a stream's file only "
                "grows; give a new one a new name."
            )
        if size_bytes == self._whole_bytes:
            return
        with self.path.open("rb") as file:
            file.seek(self._whole_bytes)
            begin = self._whole_bytes
            while chunk := file.read(CHUNK_BYTES):
                self._count(chunk, begin)
                begin += len(chunk)

    def _count(self, chunk: bytes, begin: int) -> None:
        """The newlines of `chunk`, which begins at byte `begin`."""
        place = -1
        while (place := chunk.find(b"\n", place + 1)) >= 0:
            self._lines += 1
            self._whole_bytes = begin + place + 1
            if self._whole_bytes - self._marks[-1][1] >= BLOCK_BYTES:
                self._marks.append((self._lines, self._whole_bytes))


class StreamSamples:
    """The samples of a stream's lines. Its length bounds their numbers; reading one that has not come waits for it."""

    def __init__(self, lines: GrowingFile, fields: Fields, *, skips_bad: bool) -> None:
        self._lines, self._fields, self._skips_bad = lines, fields, skips_bad

    def __len__(self) -> int:
        return MOST_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = self._lines.line(index)
        try:
            return self._fields.sample(JSONBlock([line], len(line)).record(0))
        except DataError as error:
            raise DataError(f"{self._lines.path}, line {index}: {error}") from error

    def skips(self, index: int) -> bool:
        """Whether line `index` is left out where it is damaged."""
        return self._skips_bad


class Receiver:
    """Appends the lines of a socket to a file, in a thread of one process of this machine: whoever has the lock.

    `trouble` is why the last connection ended, "" where there was none.
    """

    def __init__(self, address: str, path: Path) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._path = (host, int(port)), path
        self._thread: Thread | None = None
        self._lock = Lock()
        self.trouble = ""

    def start(self) -> None:
        """Begins to receive, where that has not begun."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="shoal-receiver", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_name(f"{self._path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of the processes that wait here, one goes on when the holder dies
            while True:
                try:
                    self._receive()
                    self.trouble = "the sender closed the connection"
                except OSError as error:
                    self.trouble = f"{self._address[0]}:{self._address[1]}: {error}"
                time.sleep(RECONNECT_S)

    def _receive(self) -> None:
        lines = _whole_lines(self._path)
        with (
            socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S) as connection,
            self._path.open("ab") as file,
        ):
            connection.sendall(msgspec.json.encode({"from": lines}) + b"\n")
            connection.settimeout(None)
            rest = b""
            while chunk := connection.recv(CHUNK_BYTES):
                whole, newline, rest = (rest + chunk).rpartition(b"\n")
                if newline:
                    file.write(whole + newline)
                    file.flush()
                    os.fsync(file.fileno())


def _whole_lines(path: Path) -> int:
    """The lines in the file; what a crash left of one behind them is cut off."""
    lines, whole_bytes, seen_bytes = 0, 0, 0
    with path.open("a+b") as file:
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            lines += chunk.count(b"\n")
            if (last := chunk.rfind(b"\n")) >= 0:
                whole_bytes = seen_bytes + last + 1
            seen_bytes += len(chunk)
        file.truncate(whole_bytes)
    return lines
