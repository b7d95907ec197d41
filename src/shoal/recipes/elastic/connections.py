"""Ending what this process waits for on hosts that are out of reach.

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
from pathlib import Path

from shoal.resilience.events import View

FDS = Path("/proc/self/fd")


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


def _host_of_peer(connection: socket.socket) -> str:
    """A socket of IPv6 that talks to one of IPv4 names its peer "::ffff:10.0.0.2" (RFC 4291, 2.5.5.2)."""
    return str(connection.getpeername()[0]).removeprefix("::ffff:")
