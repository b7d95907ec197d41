"""Opening an `MpiGroup`: the ranks tell each other their numbers in MPI's world, through the store."""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.diagnosis import introduce
from shoal.comm.mpi.group import MpiGroup
from shoal.comm.mpi.world import communicator, load_mpi


def share_mpi(store: Store, rank: int, size: int, *, timeout_s: float) -> MpiGroup:
    """Blocks until all ranks of the group have called it."""
    mpi = load_mpi()
    mine = str(mpi.COMM_WORLD.Get_rank())
    answers = introduce(PrefixStore("mpi", store), rank, size, myself=mine, timeout_s=timeout_s)
    return MpiGroup(mpi, communicator([int(answer) for answer in answers]), timeout_s=timeout_s)
