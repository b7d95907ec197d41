"""Hosts that are out of reach: finding them, and ending what this process waits for on them.

A host that is gone, or behind a cut link, closes no connection: who waits for it would wait for the timeout of a
collective, and Gloo does not end a call that is under way. So when the coordinator has fenced all replicas of a host,
this process shuts down its own ends of all connections to it. Its calls then fail as if the peer had closed them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.resilience.events import View

FDS = Path("/proc/self/fd")
REACH_S = 3.0
"""How long a member may take to accept a connection."""


def hosts_lost(view: View, lost: Collection[str], *, here: str) -> set[str]:
    """The hosts of `view` that have `lost` members alone, by the addresses that these joined with; `here` is none."""
    hosts = {name: address.rpartition(":")[0] for name, address in zip(view.members, view.addresses, strict=True)}
    living = {hosts[name] for name in hosts if name not in lost}
    return {hosts[name] for name in hosts if name in lost} - living - {"", here}


def shut_down_connections(hosts: Collection[str]) -> int:
    """Shuts down this process's TCP connections to `hosts` (addresses); how many there were. Needs Linux's /proc."""
    count = 0
    for fd in [int(name) for name in os.listdir(FDS)] if hosts and FDS.is_dir() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            duplicate = os.dup(fd)
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=duplicate) as connection, contextlib.suppress(OSError):  # one that is not connected
            if connection.family in (socket.AF_INET, socket.AF_INET6) and _host_of_peer(connection) in hosts:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def unreachable(view: View, replica: str, *, within_s: float = REACH_S) -> str:
    """The first member of `view`, other than `replica`, at whose address nothing takes a connection; "" where all do.

    The members' stores listen there. All are tried at once.
    """
    others = [(name, where) for name, where in zip(view.members, view.addresses, strict=True) if name != replica]
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        found = pool.map(lambda other: _answers(other[1], within_s), others)
        return next((name for (name, _), answers in zip(others, found, strict=True) if not answers), "")


def _answers(address: str, within_s: float) -> bool:
    host, _, port = address.rpartition(":")
    if not host:
        return True  # it has gone, which the coordinator knows
    try:
        with socket.create_connection((host, int(port)), within_s):
            return True
    except OSError:
        return False


def _host_of_peer(connection: socket.socket) -> str:
    """A socket of IPv6 that talks to one of IPv4 names its peer "::ffff:10.0.0.2" (RFC 4291, 2.5.5.2)."""
    return str(connection.getpeername()[0]).removeprefix("::ffff:")
