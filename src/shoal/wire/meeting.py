"""Where the ranks of any launcher meet, without torch: one store, hosted by rank 0.

    launcher        where                                                   token
    shoal           MASTER_ADDR, on the socket that the launcher bound      the launcher's
    torchrun        MASTER_ADDR, at a port that follows from the run's id   the user's own, or SHOAL_JOB_TOKEN's
    slurm, mpi      as `shoal.launch.rendezvous`                            the same
    none            nowhere: a process alone

torchrun's agents keep the port that they announce for a store of their own, which speaks PyTorch's protocol.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from shoal.launch import sockets
from shoal.launch.environment import ALONE, FIRST_PORT, LOOPBACK, PORTS, STORE_FD, Place, master_from, place_from
from shoal.launch.over_mpi import meet_over_mpi, mpi_is_there
from shoal.launch.store.connection import StoreConnection, reach_store
from shoal.launch.store.token import job_token

START_S = 600.0
"""How long ranks wait for each other at the start."""


class Met(NamedTuple):
    """This process's place, its connection to the store, the job's token, and this host's address for the others.

    Of a process alone, `connection` is None.
    """

    place: Place
    connection: StoreConnection | None
    token: bytes
    address: str


def meet(environ: Mapping[str, str] = os.environ, *, timeout_s: float = START_S) -> Met:
    """Connects this rank; rank 0 hosts the store.

    Raises `EnvironmentFault` where the variables contradict each other, `InUse` for a port that is taken, and
    `CollectiveError` where rank 0 does not come.
    """
    place = place_from(environ) or ALONE
    if place.world_size == 1:
        return Met(place, None, b"", LOOPBACK)
    if place.launcher == "mpi" and not environ.get("MASTER_PORT") and mpi_is_there():
        address, port, token, listen_fd = meet_over_mpi(place, environ, timeout_s=timeout_s)
    else:
        address, port = _store_at(environ)
        token, listen_fd = job_token(environ), None
        if place.rank == 0:
            own = environ.get(STORE_FD)
            listen_fd = int(own) if own else sockets.listen_at(address, port, one_host=place.one_host).detach()
    connection = reach_store(place, address, port, token=token, timeout_s=timeout_s, listen_fd=listen_fd)
    own_address = LOOPBACK if place.one_host else sockets.address_towards(address, port)
    return Met(place, connection, token, own_address)


def _store_at(environ: Mapping[str, str]) -> tuple[str, int]:
    address, port = master_from(environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        run = (environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "0"), port)
        port = FIRST_PORT + zlib.crc32(repr(run).encode()) % PORTS
    return address, port
