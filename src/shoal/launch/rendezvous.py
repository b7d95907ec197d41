"""Ranks that mpiexec started hear over MPI where rank 0's store is: MPI knows all ranks before anything else does.

MPI itself would carry the run, but the run needs a store beside it, for votes and for what threads say to each other.

Where the ranks of a run find each other: one key-value store, hosted by rank 0 (or by torchrun's agent).

PyTorch's `TCPStore` listens on every interface, even for 127.0.0.1. So the socket is bound here, or was by Shoal's
launcher, and handed over: loopback only while all ranks share a host, else the one address that the ranks were given.
Ranks that mpiexec started and that have mpi4py need no address: rank 0 takes a free port and says so over MPI.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shoal.errors import EnvironmentFault, InUse
from shoal.launch import loopback
from shoal.launch.environment import LOOPBACK, STORE_FD, Place, master_from

_TEXT_BYTES = 256


def mpi_is_there() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def told_by_rank_0(place: Place, text: str) -> str:
    """Rank 0's `text`, up to 256 bytes, on every rank; the others pass anything. Blocks until all have called it.

    Raises `EnvironmentFault` where mpi4py and mpiexec are of different MPIs.
    """
    mpi: Any = importlib.import_module("mpi4py.MPI")  # its import starts MPI
    world = mpi.COMM_WORLD
    if (found := (world.Get_rank(), world.Get_size())) != (place.rank, place.world_size):
        raise EnvironmentFault(
            f"mpiexec says rank {place.rank} of {place.world_size}, mpi4py rank {found[0]} of {found[1]}: both have to "
            "be of one MPI; start them with the mpiexec of the MPI that mpi4py finds"
        )
    message = bytearray(text.encode().ljust(_TEXT_BYTES, b"\0"))
    world.Bcast([message, mpi.BYTE], root=0)
    return message.rstrip(b"\0").decode()


# torch.distributed documents these three, but does not list them in its `__all__`.


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_EVERY_INTERFACE = ("", "::")


def open_store(place: Place, environ: Mapping[str, str], *, timeout_s: float) -> Store:
    """This rank's connection to the run's store; rank 0 hosts it where nobody else does.

    `timeout_s` bounds the connection and every later wait on the store. Raises `InUse` for a port that is taken, and
    `EnvironmentFault` where the store cannot be reached.
    """
    if place.launcher == "mpi" and not environ.get("MASTER_PORT") and mpi_is_there():
        return _over_mpi(place, environ, timeout_s=timeout_s)
    address, port = master_from(environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        run, restart = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = _connect(place, address, port, timeout_s=timeout_s, listen_fd=None)
        # The agent keeps its own keys there, and those of the attempts before this one.
        return PrefixStore(f"shoal/{run}/{restart}", store)
    listen_fd = _listening_fd(place, address, port, environ) if place.rank == 0 else None
    return _connect(place, address, port, timeout_s=timeout_s, listen_fd=listen_fd)


def interface_for(place: Place, environ: MutableMapping[str, str]) -> str | None:
    """Keep Gloo on loopback while all ranks share a host, unless the user chose; returns the interface's name."""
    if place.one_host and not environ.get(GLOO_INTERFACE):
        environ[GLOO_INTERFACE] = loopback.interface_name()
    return environ.get(GLOO_INTERFACE)


def _over_mpi(place: Place, environ: Mapping[str, str], *, timeout_s: float) -> Store:
    """Rank 0 takes a free port, and says over MPI where it is."""
    address = environ.get("MASTER_ADDR") or (LOOPBACK if place.one_host else socket.gethostname())
    listen_fd = _listening_fd(place, address, 0, environ) if place.rank == 0 else None
    address, _, port = told_by_rank_0(place, f"{address} {_port_of(listen_fd)}").rpartition(" ")
    return _connect(place, address, int(port), timeout_s=timeout_s, listen_fd=listen_fd)


def _port_of(listen_fd: int | None) -> int:
    if listen_fd is None:
        return 0
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        return listener.getsockname()[1]


def _listening_fd(place: Place, address: str, port: int, environ: Mapping[str, str]) -> int:
    if environ.get(STORE_FD):
        return int(environ[STORE_FD])
    family, host = _local_end(place, address, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last owner has just gone is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, host, port, place)
        listener.listen(loopback.BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(error, address, port) from error
    return listener.detach()


def _local_end(place: Place, address: str, port: int) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise EnvironmentFault(
            f"MASTER_ADDR is {address!r}, which has no address ({error}): rank 0 listens there; "
            "set it to rank 0's address, or add the name to /etc/hosts"
        ) from error
    host = str(found[0])
    # Many systems list their own name as 127.0.1.1: right for this host, wrong for ranks on others.
    if not place.one_host and ipaddress.ip_address(host).is_loopback:
        host = _EVERY_INTERFACE[family == socket.AF_INET6]
    return family, host


def _bind(listener: socket.socket, host: str, port: int, place: Place) -> None:
    try:
        listener.bind((host, port))
    except OSError as error:
        if place.one_host or error.errno != errno.EADDRNOTAVAIL:
            raise
        # Behind a container's service the address that peers use is on no interface of this host.
        listener.bind((_EVERY_INTERFACE[listener.family == socket.AF_INET6], port))


def _bind_error(error: OSError, address: str, port: int) -> EnvironmentFault:
    if error.errno == errno.EADDRINUSE:
        return InUse(
            f"port {port} on {address} is in use: rank 0 hosts the ranks' meeting point there; "
            "stop who holds it (`ss -ltnp` shows), or set MASTER_PORT to a free one on every rank"
        )
    return EnvironmentFault(
        f"rank 0 cannot listen on {address}:{port} ({error.strerror}): MASTER_ADDR should be an address of rank 0's "
        "host and MASTER_PORT a free port above 1023; set both on every rank"
    )


def _connect(place: Place, address: str, port: int, *, timeout_s: float, listen_fd: int | None) -> TCPStore:
    try:
        return TCPStore(
            address,
            port,
            world_size=None,
            is_master=listen_fd is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    except DistError as error:
        raise EnvironmentFault(
            f"rank {place.rank} could not reach rank 0 at {address}:{port} within {timeout_s:g} s: rank 0 listens "
            "there; see whether it runs, and whether a firewall or a wrong MASTER_ADDR lies between"
        ) from error
