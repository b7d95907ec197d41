"""Coordinators for tests: real processes that can be killed, and clients of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.coordinator.client import Address, Begin, Client
from shoal.launcher.handshake import read_token
from tests.waiting import HANG_S


@dataclass
class Running:
    """A coordinator process, and where it listens."""

    process: subprocess.Popen[str]
    port: int
    token: bytes

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port, self.token)


def start(folder: Path, *options: str, port: int = 0) -> Running:
    """`shoal coordinator serve`, once it listens; a replica is lost by its silence only where `options` say so."""
    command = [sys.executable, "-m", "shoal", "coordinator", "serve", str(folder / "journal")]
    command += ["--token", str(folder / "token"), "--port", str(port), "--json", "--silence", str(HANG_S), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the coordinator ended with {process.wait()}"
    return Running(process, json.loads(line)["port"], read_token(folder / "token"))


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Running]:
    """A coordinator that ends with the block."""
    service = start(folder, *options)
    try:
        yield service
    finally:
        service.process.kill()
        service.process.wait()


def first_generation(*clients: Client) -> None:
    """All enter the first generation, as a new run."""
    assert {begin.state_from for begin in together(*clients)} == {"checkpoint"}
    for client in clients:
        client.ready(step=0, position=0)


def together(*clients: Client, timeout_s: float = HANG_S) -> list[Begin]:
    """The next generation, which all of them wait for at the same time."""
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(lambda client: client.generation(timeout_s), clients))
