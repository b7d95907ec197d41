"""The loopback interface: its name, and a listening socket on it that nobody outside this machine can reach."""

from __future__ import annotations

import socket

from shoal.errors import EnvironmentFault
from shoal.launch.environment import LOOPBACK

# Ranks connect while rank 0 still imports torch: until then they wait in the socket's queue.
BACKLOG = 4096


def interface_name() -> str:
    """The loopback interface's name: `lo` on Linux, `lo0` elsewhere. Raises `EnvironmentFault` where there is none."""
    names = [name for _, name in socket.if_nameindex()]
    for name in ("lo", "lo0"):
        if name in names:
            return name
    raise EnvironmentFault(
        f"no loopback interface among {', '.join(names) or 'none'}: ranks of one host meet there; "
        "enable it (ip link set lo up) or set GLOO_SOCKET_IFNAME"
    )


def listen() -> socket.socket:
    """A socket that listens on a free loopback port, which nobody else can take while it is open."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, 0))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise EnvironmentFault(
            f"no port can be bound on {LOOPBACK} ({error.strerror}): the ranks of a host meet there; "
            "free some ports or enable the loopback interface (ip link set lo up)"
        ) from error
    return listener
