"""JSON lines without end: a file that grows, and the lines of a socket or a Kafka topic, kept in such a file.

Line i is sample i, so the run's cursor, which counts positions, is the offset in the stream. A file keeps its lines,
and each is used in exactly one committed step. `receiver` says what a socket and a topic promise of the lines that they
bring to the file.
"""

from __future__ import annotations

import bisect
import time
from pathlib import Path
from threading import Lock
from typing import Any

from shoal.data.blocks import BLOCK_BYTES, JSONBlock
from shoal.data.dataset import Dataset, Surroundings
from shoal.data.order import MOST_SAMPLES
from shoal.data.receiver import KafkaTopic, Receiver, Sender, SocketLines
from shoal.data.record_config import Stream
from shoal.data.records import Fields
from shoal.errors import DataError

POLL_S = 0.02
CHUNK_BYTES = 2**20


def build_stream(config: Stream, around: Surroundings) -> Dataset:
    """The stream that `config` names, without an end and with nothing held out."""
    path = Path(config.path).expanduser()
    fields = Fields(config.inputs, config.targets, config.loss_weights)
    sender = _sender(config)
    receiver = None if sender is None else Receiver(sender, path)
    lines = GrowingFile(path, patience_s=config.patience_s, receiver=receiver)
    source = StreamSamples(lines, fields, skips_bad=config.bad_records == "skip")
    return Dataset(source, endless=True, facts={"stream": str(path) if sender is None else sender.name})


def _sender(config: Stream) -> Sender | None:
    if config.socket is not None:
        return SocketLines(config.socket)
    if config.kafka is not None and config.topic is not None:
        return KafkaTopic(config.kafka, config.topic, options=config.kafka_options)
    return None


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
            ConfigError, MissingExtra: what the receiver was told cannot be.
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
                if self._receiver.fault is not None:
                    raise self._receiver.fault
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
