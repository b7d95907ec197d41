"""Opening one group of ranks: who they are, over which backend they speak, and the seam in front of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.comm.algorithms.group import AlgorithmGroup
from shoal.comm.backends import BackendChoice, Capabilities, RankCapabilities, TransportName, choose_backend
from shoal.comm.board import Board
from shoal.comm.c10d_forms import open_gloo
from shoal.comm.checking.checker import CollectiveChecker
from shoal.comm.checking.deadlock import WaitGraph
from shoal.comm.collective import GroupCollective
from shoal.comm.conditions import Conditions
from shoal.comm.config import Algorithm, WireConfig
from shoal.comm.diagnosis import Diagnosis
from shoal.comm.hierarchical.group import on_two_levels, share_hosts
from shoal.comm.ledger import Ledger
from shoal.comm.mpi.group import share_mpi
from shoal.comm.mpi.world import started_by_mpiexec, why_no_mpi
from shoal.comm.seam import Seam
from shoal.comm.shm.core import CoreMissing, core_identity
from shoal.comm.shm.group import CoreGroup, share_core
from shoal.comm.shm.host import Apart, host_identity
from shoal.comm.volume import Volume
from shoal.errors import EnvironmentFault


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    device: torch.device,
    label: str,
    ledger: Ledger,
    wire: WireConfig = WireConfig(),
    conditions: Conditions | None = None,
    waits: WaitGraph | None = None,
) -> GroupCollective:
    """One group, over the backend that `choose_backend` picks. Blocks until all its ranks have called it.

    `waits` knows the group's ranks in the world by its `label`; they are the names of ranks in messages (default:
    places in the group). With `wire.check_collectives`, it finds ranks that wait for each other in different groups.

    Raises `EnvironmentFault` on every rank if the requested transport is not available, and `CollectiveError` where a
    rank does not come in time.
    """
    timeout_s, transport = wire.timeout_s, wire.transport
    ranks = waits.ranks(label) if waits else range(size)
    board = Board(store, timeout_s=timeout_s)
    myself = f"rank {ranks[rank]} (host {socket.gethostname()}, pid {os.getpid()})"
    members = board.all_gather("member", myself, rank=rank, ranks=ranks)
    group = gather_capabilities(board, rank, size, device=device, transport=transport)
    choice = choose_backend(transport, group)
    inner, choice = _opened(choice, group, store, rank, size, wire=wire)
    memory = inner if isinstance(inner, CoreGroup) and conditions is None else None  # conditions are those of calls
    if wire.algorithm != "backend" and size > 1:
        inner, choice = _by_algorithm(inner, choice, wire.algorithm, group.hosts)
    tables = inner.tables if isinstance(inner, AlgorithmGroup) else None
    own = tables.takes if tables else on_two_levels if choice.backend == "hierarchical" else None
    diagnosis = Diagnosis(board, rank, members, label)
    checker = None
    if wire.check_collectives:
        checker = CollectiveChecker(inner, diagnosis, label=label, device=device, graph=waits)
    return GroupCollective(
        Seam(
            inner, choice=choice, label=label, ledger=ledger, device=device, diagnosis=diagnosis, checker=checker,
            conditions=conditions, volume=Volume(choice.backend, rank, group.hosts, tables=tables, own=own),
        ),
        memory,
    )  # fmt: skip


def gather_capabilities(
    board: Board, rank: int, size: int, *, device: torch.device, transport: TransportName
) -> Capabilities:
    """What the ranks of a group tell each other before they choose a backend. Blocks until all have called it."""
    host, core, no_core = socket.gethostname(), "", ""
    try:
        host = host_identity()
        core = core_identity()
    except (OSError, CoreMissing) as reason:
        no_core = str(reason)
    by_mpi = started_by_mpiexec()
    asks_mpi = device.type == "cpu" and (by_mpi or transport == "mpi")
    no_mpi = why_no_mpi() if asks_mpi else "no MPI launcher started them"
    mine = RankCapabilities(host, core=core, no_core=no_core, no_mpi=no_mpi, by_mpi=by_mpi)
    answers = board.all_gather("capabilities", msgspec.json.encode(mine).decode(), rank=rank, ranks=range(size))
    every = [msgspec.json.decode(answer, type=RankCapabilities) for answer in answers]
    return Capabilities.of_all(every, device="cuda" if device.type == "cuda" else "cpu")


def _opened(
    choice: BackendChoice, group: Capabilities, store: Store, rank: int, size: int, *, wire: WireConfig
) -> tuple[Any, BackendChoice]:
    """The group, and what it became: ranks that only seemed to share a host get Gloo, unless asked otherwise."""
    timeout_s, transport = wire.timeout_s, wire.transport
    if choice.backend == "nccl":
        return open_nccl(store, rank, size, timeout_s), choice
    if choice.backend == "mpi":
        return share_mpi(store, rank, size, timeout_s=timeout_s), choice
    gloo = open_gloo(store, rank, size, timeout_s=timeout_s)
    if choice.backend == "gloo":
        return gloo, choice
    if size == 1:
        return gloo, BackendChoice("gloo", "gloo: one rank alone")
    try:
        if choice.backend == "shm":
            return share_core(gloo, store, timeout_s=timeout_s), choice
        return share_hosts(gloo, store, hosts=group.hosts, timeout_s=timeout_s), choice
    except (Apart, CoreMissing) as reason:
        if transport != "auto":
            raise EnvironmentFault(
                f'wire.transport = "{transport}" is not available to these {size} ranks: {reason}; set it to "auto", '
                "which takes what is there"
            ) from None
        return gloo, BackendChoice("gloo", f"gloo: {reason}")


def _by_algorithm(
    inner: Any, choice: BackendChoice, algorithm: Algorithm, hosts: Sequence[str]
) -> tuple[Any, BackendChoice]:
    """Groups that are not over Gloo stay as they are, and say so."""
    if choice.backend == "gloo":
        return AlgorithmGroup(inner, algorithm, hosts), BackendChoice("gloo", f"{choice.why}; algorithm: {algorithm}")
    return inner, BackendChoice(choice.backend, f'{choice.why}; wire.algorithm = "{algorithm}" is for groups over Gloo')


def open_nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """A group over NCCL, for tensors on GPUs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
