"""A coordinator of a rehearsed elastic run as a process of its own on this host, which can be killed and comes back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.experiments.rehearsal.two_hosts import Started, end_coordinator, serving, started_coordinator
from shoal.launch.environment import LOOPBACK
from shoal.resilience.config import ElasticConfig


class CoordinatorProcess:
    """Serves on loopback from its creation on. As a context manager it ends with the block."""

    def __init__(self, elastic: ElasticConfig, folder: Path, environ: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._elastic, self._folder, self._environ = elastic, folder, environ
        self._process, self._port = started_coordinator(serving(elastic, folder, LOOPBACK, 0), environ)

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        end_coordinator(self._process)

    def command(self, train: Sequence[str]) -> Started:
        """`train` (the arguments of Python) with all replicas on this host."""
        options = ["--coordinator", f"{LOOPBACK}:{self._port}", "--token", str(self._folder / "token")]
        replicas = ["--replicas", str(self._elastic.max)]
        return Started([sys.executable, *train, *options, *replicas], self._environ)

    def kill(self) -> None:
        """kill -9: nobody is told, and the journal is what it is."""
        self._process.kill()
        self._process.wait()

    def come_back(self) -> None:
        """On the same port, with the same journal."""
        if self._process.poll() is not None:
            end_coordinator(self._process)
            command = serving(self._elastic, self._folder, LOOPBACK, self._port)
            self._process, _ = started_coordinator(command, self._environ)
