"""Ports for programs that are told theirs before they listen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens at. They are none of those that the kernel hands out by itself, so that no
    connection of another test takes one before it is used."""
    candidates = range(_FIRST, int(_RANGE.read_text().split()[0]))
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"of 100 ports in {candidates} fewer than {count} are free")


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
