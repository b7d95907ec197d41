"""`Timeline`: what happened to each tensor, in the trace format of Chrome (chrome://tracing, Perfetto): a row a tensor,
NEGOTIATE from its beginning until all ranks had begun it, then the call itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Timeline:
    """Off until `start`. Threads may use it."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._mark_cycles = False

    def start(self, path: Path, *, mark_cycles: bool = False) -> None:
        """Writes to `path` from now on. Raises `OSError`."""
        self.stop()
        with self._lock:
            self._file, self._rows, self._mark_cycles = path.open("w"), {}, mark_cycles
            self._file.write("[\n")

    def stop(self) -> None:
        """Completes the file, where there is one."""
        with self._lock:
            if self._file is not None:
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    def cycle(self) -> None:
        """A round of negotiation begins."""
        if self._file is not None and self._mark_cycles:
            self._write({"name": "CYCLE_START", "ph": "i", "ts": _us(time.perf_counter()), "pid": 0, "s": "g"})

    def negotiated(self, name: str, begin_s: float) -> None:
        """All ranks have begun the call of that name."""
        self._span([name], "NEGOTIATE", begin_s)

    @contextmanager
    def phase(self, names: Sequence[str], what: str) -> Iterator[None]:
        """Around a call of these tensors."""
        begin_s = time.perf_counter()
        yield
        self._span(names, what, begin_s)

    def _span(self, names: Sequence[str], what: str, begin_s: float) -> None:
        if self._file is None:
            return
        begin_us, end_us = _us(begin_s), _us(time.perf_counter())
        for name in names:
            if name not in self._rows:
                self._rows[name] = len(self._rows) + 1
                row = {"name": "process_name", "ph": "M", "pid": self._rows[name], "args": {"name": name}}
                self._write(row)
            place = {"pid": self._rows[name], "tid": 0, "ts": begin_us, "dur": end_us - begin_us}
            self._write({"name": what, "ph": "X", **place})

    def _write(self, event: dict[str, object]) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(event) + ",\n")
                self._file.flush()


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
