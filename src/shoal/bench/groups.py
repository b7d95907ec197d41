"""How the ranks of a benchmark meet: their store, process groups over any transport, meshes, and PyTorch's own group.

In a lab of real links, the kernel's counters of the host's interfaces say what was sent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.assembly.lab import conditions_from
from shoal.comm.backends import TransportName
from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.config import WireConfig
from shoal.comm.connect import connect
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import Mesh, build_mesh
from shoal.launch.environment import Place
from shoal.launch.lab.iproute import Counted, counted
from shoal.launch.rendezvous import interface_for, open_store
from shoal.topology.layout import Layout

CPU = torch.device("cpu")
TIMEOUT_S = 600.0
SETTLE_S = 0.1
"""By then, the acknowledgements of the last packets have passed."""


def join_store(place: Place) -> Store:
    """The store on which all ranks of the benchmark meet. This rank computes with one thread from here on."""
    torch.set_num_threads(1)
    interface_for(place, os.environ)
    return open_store(place, os.environ, timeout_s=TIMEOUT_S)


def join_group(
    name: str,
    place: Place,
    store: Store,
    *,
    transport: TransportName = "auto",
    ledger: Ledger | None = None,
    rank: int | None = None,
) -> GroupCollective:
    """The group `name` of all ranks; in a throttled lab, at the rates of the lab.

    `rank` is this rank's number in the group, where it is another than the launcher's.
    """
    conditions = conditions_from(os.environ)
    return connect(
        PrefixStore(name, store),
        place.rank if rank is None else rank,
        place.world_size,
        device=CPU,
        label=name,
        ledger=Ledger() if ledger is None else ledger,
        conditions=None if conditions is None else conditions.among(range(place.world_size), place.rank),
        wire=WireConfig(timeout_s=TIMEOUT_S, transport=transport),
    )


def join_mesh(layout: Layout, place: Place, store: Store) -> Mesh:
    """The mesh of a layout of all ranks."""
    return build_mesh(layout, place.rank, store=store, device=CPU, wire=WireConfig(timeout_s=TIMEOUT_S))


def join_default_group(place: Place, store: Store, stack: ExitStack) -> None:
    """Makes PyTorch's default group over Gloo, for scripts that do not use Shoal; `stack` destroys it."""
    dist.init_process_group("gloo", store=PrefixStore("peers", store), rank=place.rank, world_size=place.world_size)
    stack.callback(dist.destroy_process_group)


def gathered(group: Collective, own: list[float]) -> list[list[float]]:
    """The numbers of every rank, in rank order."""
    mine = torch.tensor(own, dtype=torch.float64)
    everyone = torch.empty(group.size * len(own), dtype=torch.float64)
    group.all_gather(everyone, mine).wait()
    return everyone.view(group.size, len(own)).tolist()


def while_counting(clock: Collective, work: Callable[[], None]) -> Counted:
    """What this rank's host sent while all ranks did `work`; nobody sends before or after."""
    clock.barrier().wait()
    time.sleep(SETTLE_S)
    before = counted()
    clock.barrier().wait()
    work()
    clock.barrier().wait()
    time.sleep(SETTLE_S)
    return counted() - before
