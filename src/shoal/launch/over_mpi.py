"""Where ranks that mpiexec started meet: rank 0 takes a free port, and says over MPI where. It imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.errors import EnvironmentFault
from shoal.launch import sockets
from shoal.launch.environment import LOOPBACK, Place
from shoal.launch.store.connection import SEE, START_KEY
from shoal.launch.wait import bounded

TOKEN_BYTES = 32
_MPI_TEXT_BYTES = 512
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1


class Met(NamedTuple):
    """Where the store is, and which token it asks for; rank 0 has a socket that listens there."""

    address: str
    port: int
    token: bytes
    listen_fd: int | None


def mpi_is_there() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def meet_over_mpi(place: Place, environ: Mapping[str, str], *, timeout_s: float) -> Met:
    """Rank 0 takes a free port, and says over MPI where it is, and which token it asks for."""
    address = environ.get("MASTER_ADDR") or (LOOPBACK if place.one_host else socket.gethostname())
    listener = sockets.listen_at(address, 0, one_host=place.one_host) if place.rank == 0 else None
    port = listener.getsockname()[1] if listener is not None else 0
    said = _broadcast(place, f"{secrets.token_hex(TOKEN_BYTES)} {port} {address}", timeout_s=timeout_s)
    token, found, address = said.split(" ", 2)
    return Met(address, int(found), token.encode(), listener.detach() if listener is not None else None)


def _broadcast(place: Place, text: str, *, timeout_s: float) -> str:
    """Rank 0's `text`, up to 512 bytes, on every rank; the others pass anything.

    Raises `EnvironmentFault` where mpi4py and mpiexec are of different MPIs, and `CollectiveError` where the others
    have not called it within `timeout_s`.
    """
    mpi: Any = importlib.import_module("mpi4py.MPI")  # its import starts MPI
    world = mpi.COMM_WORLD
    if (found := (world.Get_rank(), world.Get_size())) != (place.rank, place.world_size):
        raise EnvironmentFault(
            f"mpiexec says rank {place.rank} of {place.world_size}, mpi4py rank {found[0]} of {found[1]}: both have to "
            "be of one MPI; start them with the mpiexec of the MPI that mpi4py finds"
        )
    message = bytearray(text.encode().ljust(_MPI_TEXT_BYTES, b"\0"))
    request = world.Ibcast([message, mpi.BYTE], root=0)

    def work(over: threading.Event) -> None:
        pause_s = _FIRST_POLL_S
        while not request.Test() and not over.wait(pause_s):
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    missing = "the other ranks" if place.rank == 0 else "rank 0"
    bounded(
        work,
        rank=place.rank,
        timeout_s=timeout_s,
        missing=lambda: f"{missing}, to meet over MPI",
        repair=f"{SEE}; {START_KEY}",
    )
    return message.rstrip(b"\0").decode()
