"""Lines that are sent, appended to a file: `Receiver` with a `Sender`, a socket here or a Kafka topic in `kafka`.

A socket gives lines *at least* once: after a break the receiver tells the sender how many whole lines it holds,
`{"from": n}`, and the sender goes on from there. One that cannot begins where it likes, and what it sends twice is
trained on twice.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock, Thread
from typing import Any, BinaryIO, Protocol

import msgspec

from shoal.errors import ConfigError, DataError, MissingExtra, ShoalError

CHUNK_BYTES = 2**20
RECONNECT_S = 0.5
CONNECT_TIMEOUT_S = 30.0


class Sender(Protocol):
    """Where lines come from. `name` is its address, for people."""

    name: str

    def receive(self, path: Path) -> None:
        """Appends lines to the file until the connection ends. Raises `OSError` for what may pass, `ShoalError` for
        what has to be mended.
        """
        ...


class Receiver:
    """Has `sender` append to the file `path`, in a thread of one process of this machine: whoever has the lock.

    `trouble` is why the last connection ended, "" where there was none; `fault` is what ended the thread.
    """

    def __init__(self, sender: Sender, path: Path) -> None:
        self._sender, self._path = sender, path
        self._thread: Thread | None = None
        self._lock = Lock()
        self.trouble = ""
        self.fault: ShoalError | None = None

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
            while self.fault is None:
                try:
                    self._sender.receive(self._path)
                    self.trouble = "the sender closed the connection"
                except OSError as error:
                    self.trouble = f"{self._sender.name}: {error}"
                except ShoalError as error:
                    self.fault = error
                time.sleep(RECONNECT_S)


class SocketLines:
    """The lines of a TCP connection to `address`, "host:port"."""

    def __init__(self, address: str) -> None:
        self.name = address
        host, _, port = address.rpartition(":")
        self._address = host, int(port)

    def receive(self, path: Path) -> None:
        """As `Sender.receive`: until the sender closes the connection."""
        lines = _whole_lines(path)
        with socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S) as connection, path.open("ab") as file:
            connection.sendall(msgspec.json.encode({"from": lines}) + b"\n")
            connection.settimeout(None)
            rest = b""
            while chunk := connection.recv(CHUNK_BYTES):
                whole, newline, rest = (rest + chunk).rpartition(b"\n")
                if newline:
                    append(file, whole + newline)


def append(file: BinaryIO, content: bytes) -> None:
    """Writes `content` to the end, on to the disk."""
    file.write(content)
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


# A Kafka topic as a stream: its messages as the lines of a file, each exactly once.
#
# The topic's partitions hold messages under numbers that never change, their offsets. Beside the file of lines lies a
# journal, `NAME.offsets`. One of its lines says what the next bytes of the file are made of, and is on the disk before
# them:
#
#     {"start": 812, "stop": 2040, "ranges": [[0, 17, 20], [2, 5, 9]]}
#
# bytes 812 to 2040 are the messages from offset 17 up to 20 of partition 0, then those from 5 up to 9 of partition 2. A
# receiver that begins, after any crash, makes the last entry true, from the same messages in the same order, and goes
# on where it ends. So a line that a step has used stays the line that it was. Kafka itself is asked to remember
# nothing.
#
# Partitions have no order among each other: each machine that receives from several mixes them in its own way. Receive
# on one machine, or from a topic of one partition, or keep the file where all machines see it.
#
# Source: the Kafka protocol's model of topics, partitions and offsets (kafka.apache.org/documentation, "Introduction").
# Imports confluent-kafka where it is used (extra `kafka`).


WAIT_S, LOOK_S = 0.5, 30.0
"""For messages that come, and for what must have an answer."""
MOST_MESSAGES = 1000


class Entry(msgspec.Struct, frozen=True):
    """Bytes [`start`, `stop`) of the file, and their messages: [partition, first offset, offset after the last]."""

    start: int
    stop: int
    ranges: list[tuple[int, int, int]]


class KafkaTopic:
    """The messages of `topic` on `servers`, "host:port" of some brokers with commas. See `receiver.Sender`.

    `options` are librdkafka's properties; `$NAME` in one is a variable of the environment.
    """

    def __init__(self, servers: str, topic: str, *, options: Mapping[str, str] | None = None) -> None:
        self.name, self._topic = f"kafka://{servers}/{topic}", topic
        self._options = {"bootstrap.servers": servers} | {
            key: os.path.expandvars(value) for key, value in (options or {}).items()
        }

    def receive(self, path: Path) -> None:
        """As `Sender.receive`: for ever.

        Raises `ConnectionError` where no broker answers, `ConfigError` for an unknown topic or property, `DataError`
        where messages that the file lacks are gone, `MissingExtra`.
        """
        try:
            import confluent_kafka as kafka
        except ImportError as error:
            raise MissingExtra("confluent-kafka", extra="kafka", purpose=f"reading {self.name}") from error
        try:
            # an offset that is gone is said; nothing is skipped in silence
            own = {"group.id": "shoal", "enable.auto.commit": False, "auto.offset.reset": "error", "log_level": 0}
            consumer = kafka.Consumer({**own, **self._options})
        except (kafka.KafkaException, TypeError, ValueError) as error:
            raise ConfigError(f"data.kafka_options: {error}; correct it") from error
        try:
            self._follow(kafka, consumer, path)
        except kafka.KafkaException as error:
            raise ConnectionError(str(error.args[0])) from error
        finally:
            consumer.close()

    def _follow(self, kafka: Any, consumer: Any, path: Path) -> None:
        partitions = self._partitions(consumer)
        journal = path.with_name(f"{path.name}.offsets")
        entries = _entries(journal)
        after = {partition: stop for entry in entries for partition, _, stop in entry.ranges}
        with path.open("ab") as file, journal.open("ab") as record:
            if entries:
                self._complete(kafka, consumer, entries[-1], file)
            elif file.tell():
                raise DataError(f"{path} has lines and no {journal.name} beside it: give a new stream a new name")
            at = [kafka.TopicPartition(self._topic, p, after.get(p, kafka.OFFSET_BEGINNING)) for p in partitions]
            consumer.assign(at)
            while True:
                messages = self._consumed(kafka, consumer, WAIT_S)
                if not messages:
                    continue
                start = file.tell()
                content = b"".join(map(_line, messages))
                ranges = [(p, batch[0].offset(), batch[-1].offset() + 1) for p, batch in _by_partition(messages)]
                append(record, msgspec.json.encode(Entry(start, start + len(content), ranges)) + b"\n")
                append(file, content)

    def _partitions(self, consumer: Any) -> Sequence[int]:
        found = consumer.list_topics(self._topic, timeout=LOOK_S).topics[self._topic]
        if found.error is not None:
            raise ConfigError(f"data.topic = {self._topic!r}: {found.error.str()}; create it, or correct the name")
        return sorted(found.partitions)

    def _complete(self, kafka: Any, consumer: Any, entry: Entry, file: Any) -> None:
        """Fetches the messages of the last entry again where the file ends before it does."""
        size_bytes = file.tell()
        if size_bytes >= entry.stop:
            file.truncate(entry.stop)
            return
        if size_bytes < entry.start:
            raise DataError(
                f"{file.name} has {size_bytes} bytes and its journal says {entry.start}: it was shortened; give the "
                "stream a new name"
            )
        content = b"".join(
            line
            for partition, first, stop in entry.ranges
            for line in self._again(kafka, consumer, partition, first, stop)
        )
        if entry.start + len(content) != entry.stop:
            raise DataError(
                f"{self.name} no longer holds the messages that {file.name} lacks: give the stream a new name"
            )
        file.truncate(entry.start)
        append(file, content)

    def _again(self, kafka: Any, consumer: Any, partition: int, first: int, stop: int) -> list[bytes]:
        low, high = consumer.get_watermark_offsets(kafka.TopicPartition(self._topic, partition), timeout=LOOK_S)
        if first < low or stop > high:
            return []
        consumer.assign([kafka.TopicPartition(self._topic, partition, first)])
        lines: list[bytes] = []
        deadline_s = time.monotonic() + LOOK_S
        while time.monotonic() < deadline_s:
            messages = self._consumed(kafka, consumer, WAIT_S)
            lines += [_line(message) for message in messages if message.offset() < stop]
            if messages and messages[-1].offset() >= stop - 1:
                return lines
        raise ConnectionError(f"partition {partition} did not send its messages {first} to {stop} in {LOOK_S:g} s")

    def _consumed(self, kafka: Any, consumer: Any, wait_s: float) -> list[Any]:
        """The messages that have come, in the order of the partitions; those of each in order of their offsets."""
        messages = consumer.consume(MOST_MESSAGES, wait_s)
        for message in messages:
            error = message.error()
            if error is None:
                continue
            if error.code() in (kafka.KafkaError._AUTO_OFFSET_RESET, kafka.KafkaError.OFFSET_OUT_OF_RANGE):
                raise DataError(f"{self.name} has deleted messages that were not read yet ({error.str()})")
            raise kafka.KafkaException(error)
        return sorted(messages, key=lambda message: (message.partition(), message.offset()))


def _line(message: Any) -> bytes:
    """The message's value as one line: in JSON, a newline is space between tokens. An empty one for no value."""
    return (message.value() or b"").replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"


def _by_partition(messages: Sequence[Any]) -> list[tuple[int, list[Any]]]:
    batches: dict[int, list[Any]] = {}
    for message in messages:
        batches.setdefault(message.partition(), []).append(message)
    return list(batches.items())


def _entries(journal: Path) -> list[Entry]:
    """What the journal holds; half a line at its end, which a crash has left, is cut off.

    Raises `DataError` for another one than `KafkaTopic` writes.
    """
    if not journal.exists():
        return []
    content = journal.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(journal, len(whole))
    try:
        return [msgspec.json.decode(line, type=Entry) for line in whole.splitlines()]
    except msgspec.MsgspecError as error:
        raise DataError(f"{journal} is damaged: {error}") from error
