"""`Mesh`: a layout bound to live process groups, for one generation of the membership.

Groups are built straight from the store, under a name that holds the generation: no global default group, so that a
group can be dropped and a new one stand beside what is left of the old.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.algorithms.group import AlgorithmGroup
from shoal.comm.board import Board
from shoal.comm.c10d_forms import open_gloo
from shoal.comm.checking import CollectiveChecker, WaitGraph
from shoal.comm.collective import Alone, Collective, GroupCollective
from shoal.comm.conditions import Conditions
from shoal.comm.config import (
    Algorithm,
    BackendChoice,
    Capabilities,
    RankCapabilities,
    TransportName,
    WireConfig,
    choose_backend,
)
from shoal.comm.diagnosis import Diagnosis
from shoal.comm.exchanges.between_hosts import Levels
from shoal.comm.hierarchical import on_two_levels, share_hosts
from shoal.comm.ledger import Ledger
from shoal.comm.messages import Messages, Pair, messages_of
from shoal.comm.mpi import share_mpi
from shoal.comm.mpi_world import started_by_mpiexec, why_no_mpi
from shoal.comm.nccl import gpu_identity, open_nccl
from shoal.comm.seam import Seam
from shoal.comm.shm.core import CoreMissing, core_identity
from shoal.comm.shm.group import CoreGroup, share_core
from shoal.comm.shm.host import Apart, host_identity
from shoal.comm.two_levels import division_of
from shoal.comm.volume import Volume
from shoal.errors import CollectiveError, EnvironmentFault
from shoal.topology.layout import Axis, Layout

# Opening one group of ranks: who they are, over which backend they speak, and the seam in front of it.


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
    if board.published(f"member/{rank}"):  # with addresses at which nobody waits for this group
        raise CollectiveError(
            f"rank {ranks[rank]} has opened group {label} in this part of the store before, and would look for the "
            "others where they were then: give each mesh a store or a generation of its own"
        )
    members = board.all_gather("member", myself, rank=rank, ranks=ranks)
    group = gather_capabilities(board, rank, size, device=device, transport=transport)
    choice = choose_backend(transport, group)
    inner, choice = _opened(choice, group, store, rank, size, wire=wire, device=device)
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
    gpu = gpu_identity(device)
    mine = RankCapabilities(host, core=core, no_core=no_core, no_mpi=no_mpi, by_mpi=by_mpi, gpu=gpu)
    answers = board.all_gather("capabilities", msgspec.json.encode(mine).decode(), rank=rank, ranks=range(size))
    every = [msgspec.json.decode(answer, type=RankCapabilities) for answer in answers]
    return Capabilities.of_all(every, device="cuda" if device.type == "cuda" else "cpu")


def _opened(
    choice: BackendChoice, group: Capabilities, store: Store, rank: int, size: int, *, wire: WireConfig,
    device: torch.device,
) -> tuple[Any, BackendChoice]:  # fmt: skip
    """The group, and what it became: ranks that only seemed to share a host get Gloo, unless asked otherwise."""
    timeout_s, transport = wire.timeout_s, wire.transport
    if choice.backend == "nccl":
        return open_nccl(store, rank, size, timeout_s, device=device), choice
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


CODED_LANE = "coded"
"""Of the groups between which coded sums are divided."""

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

    def messages(self, *axes: Axis, pairs: Iterable[Pair]) -> Messages:
        """What the ranks of `axis` send each other over, `pairs` of its places alone. All of them call it, in the same
        order as for groups.
        """
        return messages_of(self, self.layout.group(axes, self.rank), pairs)

    def ranks(self, ranks: Sequence[int], *, lane: str = "") -> Collective:
        """The group of these ranks of the world, ascending, this one among them."""
        key = (tuple(ranks), lane)
        if key not in self._open:
            self._open[key] = Alone() if len(key[0]) == 1 else self._connect(*key)
        return self._open[key]

    def process_group(self, ranks: Sequence[int], *, lane: str) -> Seam:
        """The same as a group of PyTorch, which code of others speaks; also of one rank."""
        key = (tuple(ranks), lane)
        if key not in self._open:
            self._open[key] = self._connect(*key)
        opened = self._open[key]
        assert isinstance(opened, GroupCollective)
        assert isinstance(opened.group, Seam)
        opened.group.opener = lambda ranks, lane: self.process_group(ranks, lane=lane)
        return opened.group

    def opened(self) -> dict[str, tuple[Ranks, Seam]]:
        """The groups that are open, by their labels, each with its ranks of the world."""
        opened = list(self._open.items())  # at once: a watching thread asks while the one that trains opens others
        groups = ((ranks, found.group) for (ranks, _), found in opened if isinstance(found, GroupCollective))
        return {group.label: (ranks, group) for ranks, group in groups if isinstance(group, Seam)}

    def abort(self) -> None:
        """Ends all groups now: what waits in a collective of theirs, here and on other ranks, fails."""
        for group in self._open.values():
            if isinstance(group, GroupCollective):
                group.group.abort()
        self._open.clear()

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks are on several hosts, as far as they know."""
        return len(set(self._hosts)) > 1

    @property
    def _hosts(self) -> Sequence[str]:
        world = self.world
        return world.hosts if isinstance(world, GroupCollective) else ()

    def levels(self, group: Collective) -> Levels | None:
        """How `group`, of this mesh, lies on hosts; None if on one, if with one rank on each, or if nobody knows.

        Opens groups: all ranks of `group` call it, in the same order as for other groups.
        """
        ranks = next(ranks for (ranks, _), opened in self._open.items() if opened is group)
        hosts = self._hosts
        division = division_of([hosts[rank] for rank in ranks]).hosts if hosts else ()
        if not 1 < len(division) < len(ranks):
            return None
        mates = next(places for places in division if ranks.index(self.rank) in places)
        place, leading = mates.index(ranks.index(self.rank)), min(map(len, division))
        across = sorted(ranks[places[place]] for places in division) if place < leading else None
        return Levels(
            self.ranks([ranks[each] for each in mates], lane=CODED_LANE),
            None if across is None else self.ranks(across, lane=CODED_LANE),
            leading,
        )

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
    wire: WireConfig = WireConfig(),
    conditions: Conditions | None = None,
) -> Mesh:
    """Connects this rank to the others. Blocks until all ranks of the layout have called it.

    `wire` says what the groups talk over; `conditions` are the faults and rates that tests and labs impose.
    """
    ledger = Ledger()
    board = Board(PrefixStore(f"generation-{generation}", store), timeout_s=wire.timeout_s)
    waits = WaitGraph(board, rank)

    def connected(ranks: Ranks, lane: str) -> Collective:
        name = "world" if len(ranks) == layout.world_size else "ranks-" + "-".join(map(str, ranks))
        name = f"{name}-{lane}" if lane else name
        waits.enter(name, ranks)
        here = conditions and conditions.among(ranks, rank)
        named = PrefixStore(f"generation-{generation}/{name}", store)
        return connect(
            named, ranks.index(rank), len(ranks), device=device, label=name, ledger=ledger, wire=wire,
            conditions=here, waits=waits,
        )  # fmt: skip

    mesh = Mesh(layout, rank, device, generation, ledger, connected)
    _ = mesh.world  # all are here
    return mesh
