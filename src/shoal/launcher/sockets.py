"""The sockets at which ranks meet: who can reach them, and what stands in the way.

PyTorch's `TCPStore` listens on every interface, even for 127.0.0.1. So the socket is bound here and handed to it: on
loopback while all ranks share a host, else on the one address that the ranks were given.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import resource
import select
import socket
import struct
import sys
from typing import TYPE_CHECKING

from shoal.errors import EnvironmentFault, InUse
from shoal.launcher.environment import LOOPBACK

if TYPE_CHECKING:
    pass


# Ranks connect while rank 0 still imports torch: until then they wait in the socket's queue.
BACKLOG = 4096
CONNECT_S = 2.0
SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface (netdevice(7)). A name has at most 15 bytes."""
_EVERY_INTERFACE = ("", "::")


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


def interface_of(address: str) -> str | None:
    """The name of this host's interface that has an IPv4 `address`; None where none has, or the system does not say."""
    if ipaddress.ip_address(address).is_loopback:
        return interface_name()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def address_towards(host: str, port: int) -> str:
    """This host's address on the way to `host`: the one that others there can reach. Raises `EnvironmentFault`."""
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise EnvironmentFault(
            f"nothing answers at {host}:{port} ({error.strerror or error}): is the coordinator running, and can this "
            "host reach it?"
        ) from error


def listen_on_loopback() -> socket.socket:
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


def listen_at(address: str, port: int, *, one_host: bool) -> socket.socket:
    """Rank 0's socket at MASTER_ADDR and MASTER_PORT (0: any free port); `one_host`: no other host has to reach it.

    Raises `InUse` for a port that is taken, and `EnvironmentFault` where nothing can listen at that address.
    """
    family, host = _own_end(address, port, one_host=one_host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last owner has just gone is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, host, port, one_host=one_host)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(error, address, port) from error
    return listener


def obstacle(address: str, port: int) -> str | None:
    """Why nothing answers at an address, in a few words; None where a connection can be made. Takes `CONNECT_S`."""
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError as error:
        return reason_of(error)
    return None


def connected(address: str, port: int) -> socket.socket:
    """A connection there, which the kernel keeps an eye on. Takes `CONNECT_S`; raises `OSError`."""
    connection = socket.create_connection((address, port), CONNECT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def reason_of(error: OSError) -> str:
    """Why a connection could not be made, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"the name has no address: {error.strerror}"
    return (error.strerror or str(error)).lower()


def readable(connection: socket.socket, within_s: float) -> bool:
    """Whether there is something to read, or an end, within that time."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


def _own_end(address: str, port: int, *, one_host: bool) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise EnvironmentFault(
            f"MASTER_ADDR is {address!r}, which has no address ({error}): rank 0 listens there; "
            "set it to rank 0's address, or add the name to /etc/hosts"
        ) from error
    host = str(found[0])
    # Many systems list their own name as 127.0.1.1: right for this host, wrong for ranks on others.
    if not one_host and ipaddress.ip_address(host).is_loopback:
        host = _EVERY_INTERFACE[family == socket.AF_INET6]
    return family, host


def _bind(listener: socket.socket, host: str, port: int, *, one_host: bool) -> None:
    try:
        listener.bind((host, port))
    except OSError as error:
        if one_host or error.errno != errno.EADDRNOTAVAIL:
            raise
        # Behind a container's service the address that peers use is on no interface of this host.
        listener.bind((_EVERY_INTERFACE[listener.family == socket.AF_INET6], port))


def _bind_error(error: OSError, address: str, port: int) -> EnvironmentFault:
    if error.errno == errno.EADDRINUSE:
        return InUse(
            f"port {port} on {address} is in use: rank 0 hosts the ranks' store there; "
            "stop who holds it (`ss -ltnp` shows), or set MASTER_PORT to a free one on every rank"
        )
    return EnvironmentFault(
        f"rank 0 cannot listen on {address}:{port} ({error.strerror}): MASTER_ADDR should be an address of rank 0's "
        "host and MASTER_PORT a free port above 1023; set both on every rank"
    )


def allow_descriptors() -> None:
    """As many open connections as the system lets this process have: thousands of ranks may come."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
