"""Opening one group of ranks: who they are, over which backend they speak, and the seam in front of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.algorithms.group import AlgorithmGroup
from shoal.comm.backends import Choice, Facts, Transport, choose_backend, facts_of, written
from shoal.comm.checking.checked import ByExchange, ByMarks, Checked, Way
from shoal.comm.checking.flight_recorder import FlightRecorder
from shoal.comm.checking.revocable import Revocable
from shoal.comm.checking.waiting import Board
from shoal.comm.collective import GroupCollective
from shoal.comm.conditions import Conditions
from shoal.comm.config import Algorithm, WireConfig
from shoal.comm.diagnosis import Diagnosis, introduce
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
    world_rank: int | None = None,
    conditions: Conditions | None = None,
    board: Board | None = None,
) -> GroupCollective:
    """One group, over the backend that `choose_backend` picks. Blocks until all its ranks have called it.

    `world_rank` is this rank's name in messages (default: `rank`). With `wire.check_collectives`, ranks that wait for
    each other in different groups meet on `board`.

    Raises `EnvironmentFault` on every rank if the requested transport is not available.
    """
    timeout_s, transport = wire.timeout_s, wire.transport
    named = rank if world_rank is None else world_rank
    myself = f"rank {named} (host {socket.gethostname()}, pid {os.getpid()})"
    members = introduce(store, rank, size, myself=myself, timeout_s=timeout_s)
    facts = find_facts(store, rank, size, device=device, transport=transport, timeout_s=timeout_s)
    choice = choose_backend(transport, facts)
    inner, choice = _opened(choice, facts, store, rank, size, transport=transport, timeout_s=timeout_s)
    memory = inner.allocate if isinstance(inner, CoreGroup) else None
    if wire.algorithm != "backend" and size > 1:
        inner, choice = _by_algorithm(inner, choice, wire.algorithm, facts.hosts)
    tables = inner.tables if isinstance(inner, AlgorithmGroup) else None
    own_way = tables.takes if tables else on_two_levels if choice.backend == "hierarchical" else None
    if wire.check_collectives:
        held = Revocable(inner)
        recorder = FlightRecorder(store, rank, members, label)
        way = _way(held, choice, store, rank, size, recorder=recorder, board=board, timeout_s=timeout_s)
        inner = Checked(held, way, label=label, board=board)
    return GroupCollective(
        Seam(
            inner, backend=choice.backend, why=choice.why, label=label, ledger=ledger,
            diagnosis=Diagnosis(store, rank, members), conditions=conditions, device=device,
            volume=Volume(choice.backend, rank, facts.hosts, tables=tables), own_way=own_way,
        ),
        memory,
    )  # fmt: skip


def find_facts(
    store: Store, rank: int, size: int, *, device: torch.device, transport: Transport, timeout_s: float
) -> Facts:
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
    mine = written(host, core=core, no_core=no_core, no_mpi=no_mpi, by_mpi=by_mpi)
    answers = introduce(PrefixStore("facts", store), rank, size, myself=mine, timeout_s=timeout_s)
    return facts_of(answers, device="cuda" if device.type == "cuda" else "cpu")


def _opened(
    choice: Choice, facts: Facts, store: Store, rank: int, size: int, *, transport: Transport, timeout_s: float
) -> tuple[Any, Choice]:
    """The group, and what it became: ranks that only seemed to share a host get Gloo, unless asked otherwise."""
    if choice.backend == "nccl":
        return _nccl(store, rank, size, timeout_s), choice
    if choice.backend == "mpi":
        return share_mpi(store, rank, size, timeout_s=timeout_s), choice
    gloo = _gloo(store, rank, size, timeout_s)
    if choice.backend == "gloo":
        return gloo, choice
    if size == 1:
        return gloo, Choice("gloo", "gloo: one rank alone")
    try:
        if choice.backend == "shm":
            return share_core(gloo, store, timeout_s=timeout_s), choice
        return share_hosts(gloo, store, hosts=facts.hosts, timeout_s=timeout_s), choice
    except (Apart, CoreMissing) as reason:
        if transport != "auto":
            raise EnvironmentFault(
                f'wire.transport = "{transport}" is not available to these {size} ranks: {reason}; set it to "auto", '
                "which takes what is there"
            ) from None
        return gloo, Choice("gloo", f"gloo: {reason}")


def _by_algorithm(inner: Any, choice: Choice, algorithm: Algorithm, hosts: Sequence[str]) -> tuple[Any, Choice]:
    """Groups that are not over Gloo stay as they are, and say so."""
    if choice.backend == "gloo":
        return AlgorithmGroup(inner, algorithm, hosts), Choice("gloo", f"{choice.why}; algorithm: {algorithm}")
    return inner, Choice(choice.backend, f'{choice.why}; wire.algorithm = "{algorithm}" is for groups over Gloo')


def _way(
    inner: Revocable, choice: Choice, store: Store, rank: int, size: int, *, recorder: FlightRecorder,
    board: Board | None, timeout_s: float,
) -> Way:  # fmt: skip
    """How the ranks compare their calls: by themselves where the core does it, else in a group beside `inner`."""
    if isinstance(inner.group, CoreGroup):
        return ByMarks(inner.group, recorder)
    beside = PrefixStore("check", store)
    if choice.backend == "mpi":
        exchange = share_mpi(beside, rank, size, timeout_s=timeout_s)
    else:
        exchange = _gloo(beside, rank, size, timeout_s)
    return ByExchange(
        inner, exchange, store, recorder, board=board, expects=choice.backend not in ("mpi", "nccl"),
        blocking=choice.backend == "nccl",
    )  # fmt: skip


def _gloo(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def _nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
