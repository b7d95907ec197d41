"""`Mesh`: a layout bound to live process groups, for one generation of the membership.

Groups are built straight from the store, under a name that holds the generation: no global default group, so that a
group can be dropped and a new one stand beside what is left of the old.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.collective import GroupCollective
from shoal.comm.conditions import Conditions
from shoal.comm.diagnosis import Diagnosis, introduce
from shoal.comm.ledger import Ledger
from shoal.comm.seam import Seam
from shoal.comm.shm.group import share_memory
from shoal.topology.layout import Layout

Transport = Literal["auto", "gloo"]
"""How ranks without GPUs talk: "auto" is shared memory where all ranks of a group are on one host, else Gloo."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a layout, and the wire to the others. Immutable for one `generation`."""

    layout: Layout
    rank: int
    device: torch.device
    generation: int
    world: GroupCollective
    replicate: GroupCollective
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self.replicate.rank


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

    def group(axis: str, ranks: Sequence[int]) -> GroupCollective:
        named = PrefixStore(f"generation-{generation}/{axis}-{ranks[0]}", store)
        return connect(
            named, ranks.index(rank), len(ranks), device=device, label=axis, ledger=ledger, timeout_s=timeout_s,
            world_rank=rank, conditions=conditions, transport=transport,
        )  # fmt: skip

    world = group("world", range(layout.world_size))
    replicate_ranks = layout.group("replicate", rank)
    whole = tuple(replicate_ranks) == tuple(range(layout.world_size))
    replicate = world if whole else group("replicate", replicate_ranks)
    return Mesh(layout, rank, device, generation, world, replicate, ledger)


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
