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
from pathlib import Path
from threading import Lock, Thread
from typing import BinaryIO, Protocol

import msgspec

from shoal.errors import ShoalError

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
