"""`Mesh`: a layout bound to live process groups, for one generation of the membership.

Groups are built straight from the store, under a name that holds the generation: no global default group, so that a
group can be dropped and a new one stand beside what is left of the old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.board import Board
from shoal.comm.checking.deadlock import WaitGraph
from shoal.comm.collective import Alone, Collective, GroupCollective
from shoal.comm.conditions import Conditions
from shoal.comm.config import WireConfig
from shoal.comm.connect import connect
from shoal.comm.exchanges.between_hosts import Levels
from shoal.comm.hierarchical.division import division_of
from shoal.comm.ledger import Ledger
from shoal.comm.seam import Seam
from shoal.topology.axes import Axis
from shoal.topology.layout import Layout

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
