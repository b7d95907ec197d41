"""MPI's world of this process: whether there is one, and the communicator of some of its ranks.

mpi4py starts MPI when it is imported, so it is imported only by ranks that mpiexec has started.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.installation import install_command

_MPIEXEC = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SLURM = ("PMIX_RANK", "PMI_RANK")


def started_by_mpiexec(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether mpiexec started this process. Steps of Slurm do not count: MPI may end a process that tries it there."""
    return "SLURM_PROCID" not in environ and any(name in environ for name in _MPIEXEC)


def why_no_mpi(environ: Mapping[str, str] = os.environ) -> str:
    """The reason why this process cannot use MPI, with the repair; empty where it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"the package 'mpi4py' is missing: {install_command('mpi')}"
    if not any(name in environ for name in (*_MPIEXEC, *_SLURM)):
        return "no MPI launcher started them: use mpiexec -n 2 shoal train RUN.toml"
    try:
        mpi = load_mpi()
    except (ImportError, RuntimeError) as error:
        found = str(error).splitlines()[0]
        return f"MPI does not start ({found}): it needs an MPI library; load the cluster's, or pip install mpich"
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return "this MPI library was built without MPI_THREAD_MULTIPLE: take one that has it"
    if mpi.COMM_WORLD.Get_size() == 1:
        return "MPI sees one rank alone: mpi4py was built for another MPI than that of mpiexec; install it again"
    return ""


def load_mpi() -> Any:
    """mpi4py's module `MPI`; its first import starts MPI."""
    return importlib.import_module("mpi4py.MPI")


def communicator(ranks: Sequence[int]) -> Any:
    """Of these ranks of MPI's world, in this order; blocks until all of them have called it.

    Ranks that share several communicators have to ask for them in the same order.
    """
    world = load_mpi().COMM_WORLD
    everyone = world.Get_group()
    some = everyone.Incl(list(ranks))
    try:
        return world.Create_group(some)
    finally:
        some.Free()
        everyone.Free()
