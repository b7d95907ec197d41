"""Groups of a lab's ranks for its benchmarks, and the kernel's counters of all hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.backends import Transport
from shoal.comm.collective import Collective
from shoal.comm.conditions import Conditions
from shoal.comm.config import WireConfig
from shoal.comm.connect import connect
from shoal.comm.ledger import Ledger
from shoal.launch.environment import Place
from shoal.launch.lab.iproute import Counted, counted
from shoal.launch.rendezvous import open_store
from shoal.recipes.lab import conditions_from

CPU = torch.device("cpu")
TIMEOUT_S = 300.0
SETTLE_S = 0.1
"""Acknowledgements of the last packets are through after that."""


@dataclass(frozen=True)
class Meeting:
    """Where a lab's ranks meet; `group` opens a group of all of them."""

    place: Place
    store: Store
    conditions: Conditions | None = None

    def group(
        self, name: str, *, transport: Transport, ledger: Ledger | None = None, rank: int | None = None
    ) -> Collective:
        """Over `transport`, at the lab's rates where its ranks throttle themselves. `rank`: under another number."""
        place, conditions = self.place, self.conditions
        return connect(
            PrefixStore(name, self.store),
            self.place.rank if rank is None else rank,
            self.place.world_size,
            device=CPU,
            label=name,
            ledger=Ledger() if ledger is None else ledger,
            conditions=None if conditions is None else conditions.among(range(place.world_size), place.rank),
            wire=WireConfig(timeout_s=TIMEOUT_S, transport=transport),
        )


def meet(place: Place, environ: Mapping[str, str]) -> Meeting:
    """This rank's way to the others."""
    torch.set_num_threads(1)
    return Meeting(place, open_store(place, environ, timeout_s=TIMEOUT_S), conditions_from(environ))


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


def gathered(clock: Collective, own: list[float]) -> list[list[float]]:
    """The numbers of every rank, in rank order."""
    mine = torch.tensor(own, dtype=torch.float64)
    everyone = torch.empty(clock.size * len(own), dtype=torch.float64)
    clock.all_gather(everyone, mine).wait()
    return everyone.view(clock.size, len(own)).tolist()
