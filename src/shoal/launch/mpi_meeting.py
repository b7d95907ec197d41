"""Ranks that mpiexec started hear over MPI where rank 0's store is: MPI knows all ranks before anything else does.

MPI itself would carry the run, but the run needs a store beside it, for votes and for what threads say to each other.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from shoal.errors import EnvironmentFault
from shoal.launch.environment import Place

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
