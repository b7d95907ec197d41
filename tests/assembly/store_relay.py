"""A relay between a rank and the run's store that stops passing bytes on: a network that is cut, or a host that stands
still. Nothing is closed, so that no end hears of it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Relay:
    """Passes on what comes to `port` until `messages` pieces went to the server; then holds everything, for ever.

    At that moment it writes the time into `cut_file`, and calls `on_cut`.
    """

    def __init__(
        self, server_port: int, messages: int, cut_file: Path, on_cut: Callable[[], None] | None = None
    ) -> None:
        self._server_port, self._left, self.passed = server_port, messages, 0
        self._cut_file, self._on_cut = cut_file, on_cut
        self._lock, self.cut = threading.Lock(), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listening.accept()
            there = socket.create_connection(("127.0.0.1", self._server_port))
            threading.Thread(target=self._pass_on, args=(here, there, True), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(there, here, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                if not self._open(counts):
                    self._hold(source, target)
                target.sendall(content)
            if self._open(False):
                target.shutdown(socket.SHUT_WR)

    def _hold(self, *sockets: socket.socket) -> None:
        """Keeps the connection open, and reads no more of it."""
        threading.Event().wait()

    def _open(self, counts: bool) -> bool:
        with self._lock:
            self._left -= counts
            self.passed += counts
            if self._left < 0 and not self.cut.is_set():
                self.cut.set()
                self._cut_file.write_text(str(time.monotonic()))
                if self._on_cut is not None:
                    self._on_cut()
            return not self.cut.is_set()
