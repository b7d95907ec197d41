"""One rank of `mpiexec` in the tests of MPI: `python -m tests.comm.mpi_ranks FOLDER` writes what was wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.collective import GroupCollective
from shoal.comm.config import TransportName, WireConfig
from shoal.comm.mesh import Mesh, build_mesh
from shoal.comm.mpi import share_mpi
from shoal.comm.seam import Seam
from shoal.errors import CollectiveError, EnvironmentFault
from shoal.launcher.environment import Place, place_from
from shoal.launcher.rendezvous import interface_for, open_store
from shoal.topology.layout import Layout
from tests.comm.test_collective import everything, expected
from tests.comm.test_hierarchical import DTYPES, RELATIVE, reductions

Check = Callable[[Place, dist.Store], list[str]]
GROUPS = 3000
"""MPICH has about 2,048 communicators."""
CALLS, NUMBERS = 20, 1 << 18


def mesh_over(place: Place, store: dist.Store, transport: TransportName, *, check: bool = False) -> Mesh:
    """One replica a rank."""
    return build_mesh(
        Layout(replicate=place.world_size),
        place.rank,
        store=dist.PrefixStore(f"{transport}/{check}", store),
        device=torch.device("cpu"),
        wire=WireConfig(timeout_s=180, transport=transport, check_collectives=check),
    )


def seam_of(group: Any) -> Seam:
    assert isinstance(group, GroupCollective)
    assert isinstance(group.group, Seam)
    return group.group


def collectives(place: Place, store: dist.Store) -> list[str]:
    """Each is what it is defined to be; in a group of some ranks too."""
    mesh = mesh_over(place, store, "mpi")
    assert seam_of(mesh.world).backend == "mpi"
    wrong = []
    groups = [(tuple(range(place.world_size)), mesh.world)]
    if place.rank != 1:
        groups.append(((0, 2), mesh.ranks((0, 2))))
    for members, group in groups:
        got, want = everything(group), expected(group.rank, group.size)
        wrong += [f"{name} of {members}" for name in want if not torch.equal(got[name], want[name])]
    return wrong


def reduced(place: Place, store: dist.Store) -> list[str]:
    """Reductions in all dtypes against Gloo."""
    ours = seam_of(mesh_over(place, store, "mpi").world).inner
    gloo = dist.ProcessGroupGloo(store, place.rank, place.world_size, timedelta(seconds=60))
    wrong = []
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            got, want = reductions(ours, dtype, 37, op), reductions(gloo, dtype, 37, op)
            tolerance = RELATIVE.get(dtype, 0.0)
            same = (
                torch.allclose(a.double(), b.double(), rtol=tolerance, atol=0) for a, b in zip(got, want, strict=True)
            )
            if not all(same):
                wrong.append(f"{op} of {dtype}")
    mean = torch.full((5, 3), float(place.rank), dtype=torch.bfloat16).t()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    ours.allreduce([mean], options).wait()
    return wrong if (mean == 1).all() else [*wrong, "a mean of a transposed tensor"]


def disagreeing(place: Place, store: dist.Store) -> list[str]:
    """Ranks that call different things are named over MPI too, after many calls that were alike."""
    world = mesh_over(place, store, "mpi", check=True).world
    for _ in range(8):
        world.all_reduce(torch.ones(3)).wait()
    try:
        world.all_reduce(torch.ones(3 + (place.rank == 1))).wait()
    except CollectiveError as error:
        told = "float32 [3]" in str(error) and "float32 [4]" in str(error) and "mpi_ranks.py:" in str(error)
        return [] if told else [str(error)]
    return ["a wrong shape was taken"]


def refused(place: Place, store: dist.Store) -> list[str]:
    """What cannot be is refused on every rank: shared memory of ranks on different hosts."""
    os.environ["SHOAL_HOST"] = str(place.rank)
    try:
        mesh_over(place, store, "shm")
    except EnvironmentFault as refusal:
        return [] if "3 hosts" in str(refusal) else [str(refusal)]
    finally:
        del os.environ["SHOAL_HOST"]
    return ["shared memory between hosts"]


def chosen(place: Place, store: dist.Store) -> list[str]:
    """On several hosts MPI is taken without being asked for, where mpiexec has started the ranks."""
    os.environ["SHOAL_HOST"] = str(place.rank // 2)
    try:
        seam = seam_of(mesh_over(place, store, "auto").world)
    finally:
        del os.environ["SHOAL_HOST"]
    return [] if seam.backend == "mpi" else [f"{seam.backend}: {seam.why}"]


def many_groups(place: Place, store: dist.Store) -> list[str]:
    """More groups than MPI has communicators, one after the other: shut down, dropped, or dropped in a call."""
    for number in range(GROUPS):
        group = share_mpi(dist.PrefixStore(str(number), store), place.rank, place.world_size, timeout_s=180)
        total = torch.ones(3)
        work = group.allreduce([total])
        if number % 3:
            work.wait()
        if number % 3 == 1:
            group.shutdown()
        del group, work
    return []


def dropped_handles(place: Place, store: dist.Store) -> list[str]:
    """Memory of calls that nobody waits for is MPI's until they are over, although the group was dropped, too."""
    wrong = []
    for keeps_group in (True, False):
        group = share_mpi(dist.PrefixStore(str(keeps_group), store), place.rank, place.world_size, timeout_s=180)
        key = f"filled-{keeps_group}"
        if place.rank != 0:
            store.wait([key])
        for _ in range(CALLS):
            group.allreduce([torch.full((NUMBERS,), 1.0)])
        fillers = [torch.full((NUMBERS,), 9.0) for _ in range(4 * CALLS)]  # would take the place of what was freed
        if place.rank == 0:
            store.set(key, "")
        if keeps_group:
            last = torch.ones(NUMBERS)
            group.allreduce([last]).wait()
            wrong += [] if bool((last == place.world_size).all()) else ["the last sum"]
        del group
        store.add(f"gone-{keeps_group}", 1)
        while store.add(f"gone-{keeps_group}", 0) < place.world_size:
            time.sleep(0.01)
        time.sleep(0.5)  # what is under way goes on by itself
        wrong += [f"memory that MPI wrote to, keeps_group={keeps_group}"] * (not all((f == 9).all() for f in fillers))
    return wrong


def main(folder: Path) -> None:
    """Runs all checks; one file a rank."""
    torch.set_num_threads(1)
    place = place_from(os.environ)
    assert place is not None
    interface_for(place, os.environ)
    store = open_store(place, os.environ, timeout_s=180)
    checks: list[Check] = [collectives, reduced, many_groups, dropped_handles, disagreeing, refused, chosen]
    found = {check.__name__: check(place, dist.PrefixStore(check.__name__, store)) for check in checks}
    (folder / f"{place.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
