"""`Mesh`: a layout bound to live process groups, for one generation of the membership.

Groups are built straight from the store, under a name that holds the generation: no global default group, so that a
group can be dropped and a new one stand beside what is left of the old.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.alone import Alone
from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.conditions import Conditions
from shoal.comm.diagnosis import Diagnosis, introduce
from shoal.comm.ledger import Ledger
from shoal.comm.seam import Seam
from shoal.comm.shm.group import share_memory
from shoal.topology.axes import Axis
from shoal.topology.layout import Layout

Transport = Literal["auto", "gloo"]
"""How ranks without GPUs talk: "auto" is shared memory where all ranks of a group are on one host, else Gloo."""


Ranks = tuple[int, ...]
Connect = Callable[[Ranks, str], Collective]
"""From ranks of the world and the name of a lane to their group."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a layout, and the wire to the others. Immutable for one `generation`.

    Groups are opened when they are first asked for, and once: every rank of a group has to ask for it, and ranks that
    share several groups have to ask for them in the same order.
    """

    layout: Layout
    rank: int
    device: torch.device
    generation: int
    ledger: Ledger
    _connect: Connect
    _open: dict[tuple[Ranks, str], Collective] = field(default_factory=dict)

    @property
    def world(self) -> Collective:
        """All ranks."""
        return self.ranks(range(self.layout.world_size))

    def axis(self, *axes: Axis, lane: str = "") -> Collective:
        """The ranks that differ from this one along `axes` at most; their order is that of the layout.

        Groups of the same ranks and another `lane` are others: traffic of one does not wait behind that of the other.
        """
        return self.ranks(self.layout.group(axes, self.rank), lane=lane)

    def ranks(self, ranks: Sequence[int], *, lane: str = "") -> Collective:
        """The group of these ranks of the world, ascending, this one among them."""
        key = (tuple(ranks), lane)
        if key not in self._open:
            self._open[key] = Alone() if len(key[0]) == 1 else self._connect(*key)
        return self._open[key]

    @property
    def batch_share(self) -> tuple[int, int]:
        """(index, number): which part of every global batch this rank sees, and of how many."""
        replica, shard = self.layout.index("replicate", self.rank), self.layout.index("shard", self.rank)
        return replica * self.layout.shard + shard, self.layout.replicate * self.layout.shard


def build_mesh(
    layout: Layout,
    rank: int,
    *,
    store: Store,
    device: torch.device,
    generation: int = 0,
    timeout_s: float = 60.0,
    conditions: Conditions | None = None,
    transport: Transport = "auto",
) -> Mesh:
    """Connects this rank to the others. Blocks until all ranks of the layout have called it."""
    ledger = Ledger()

    def connected(ranks: Ranks, lane: str) -> Collective:
        name = "world" if len(ranks) == layout.world_size else "ranks-" + "-".join(map(str, ranks))
        name = f"{name}-{lane}" if lane else name
        named = PrefixStore(f"generation-{generation}/{name}", store)
        return connect(
            named, ranks.index(rank), len(ranks), device=device, label=name, ledger=ledger, timeout_s=timeout_s,
            world_rank=rank, conditions=conditions, transport=transport,
        )  # fmt: skip

    mesh = Mesh(layout, rank, device, generation, ledger, connected)
    _ = mesh.world  # all are here
    return mesh


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    device: torch.device,
    label: str,
    ledger: Ledger,
    timeout_s: float,
    world_rank: int | None = None,
    conditions: Conditions | None = None,
    transport: Transport = "auto",
) -> GroupCollective:
    """One group over the backend of `device`: NCCL for GPUs; else Gloo, and shared memory where ranks share a host."""
    myself = f"rank {rank if world_rank is None else world_rank} (host {socket.gethostname()}, pid {os.getpid()})"
    members = introduce(store, rank, size, myself=myself, timeout_s=timeout_s)
    if device.type == "cuda":
        inner, backend, why = _nccl(store, rank, size, timeout_s), "nccl", "nccl: GPUs"
    else:
        inner, backend, why = _for_cpus(store, rank, size, timeout_s=timeout_s, transport=transport)
    diagnosis = Diagnosis(store, rank, members)
    return GroupCollective(
        Seam(
            inner, backend=backend, why=why, label=label, ledger=ledger, diagnosis=diagnosis, conditions=conditions
        )
    )  # fmt: skip


def _nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _for_cpus(store: Store, rank: int, size: int, *, timeout_s: float, transport: Transport) -> tuple[Any, str, str]:
    """The group, its backend's name, and why it is that one."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    if transport == "gloo":
        return gloo, "gloo", "gloo: asked for"
    group, why = share_memory(gloo, store, timeout_s=timeout_s)
    return group, "gloo" if group is gloo else "shm", why
