"""How the ranks of a benchmark meet: their store, process groups over any transport, meshes, and PyTorch's own group.

In a lab of real links, the kernel's counters of the host's interfaces say what was sent.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.assembly.lab import conditions_from
from shoal.bench.report import Turns
from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.config import TransportName, WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import Mesh, build_mesh, connect
from shoal.launcher.environment import Place
from shoal.launcher.lab.network import Counted, counted
from shoal.launcher.rendezvous import interface_for, open_store
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
    """The mesh of a layout of all ranks, which join their meshes in the same order: each has keys of its own."""
    own = PrefixStore(f"mesh-{store.add(f'meshes-of-{place.rank}', 1)}", store)
    return build_mesh(layout, place.rank, store=own, device=CPU, wire=WireConfig(timeout_s=TIMEOUT_S))


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


# Several ways of taking a step, the sides, timed in turn on all ranks, so that what slows the machine slows them all.
#
# In a turn every side takes its step, in an order that changes from turn to turn and is the same on all ranks. The time
# of a step is that of the slowest rank, from a barrier on.


WARM_UP_STEPS = 3
Sides = Mapping[str, Callable[[], Any]]


class Tell(Protocol):
    """`shoal.bench.report.tell`, or another that hears how far the work is."""

    def __call__(self, text: str, *, done: int, total: int) -> None: ...


def interleaved(
    sides: Sides, clock: Collective, *, pairs: int, always: Sequence[str], warm: bool = False, tell: Tell | None = None
) -> Turns:
    """Seconds of each side's step on the slowest rank, for `pairs` turns; warm-up turns are not returned.

    The sides that are compared, `always`, are in every turn, the others in every third. `warm`: a side takes three
    steps in a row, and the mean of the last two counts. The first step finds the caches as another side left them,
    whereas a step of training finds them as the step before it did.
    `tell` hears of each turn before it begins.
    """
    shuffle, turns, take = random.Random(0), [], _warm if warm else slowest
    for number in range(WARM_UP_STEPS + pairs):
        if tell is not None:
            tell("turns of all sides", done=number, total=WARM_UP_STEPS + pairs)
        order = list(sides) if number % 3 == 0 else list(always)
        shuffle.shuffle(order)
        turns.append({name: take(sides[name], clock) for name in order})
    return turns[WARM_UP_STEPS:]


def slowest(step: Callable[[], Any], clock: Collective) -> float:
    """Seconds of one step on the slowest rank, which all ranks of `clock` begin together."""
    clock.barrier().wait()
    begin_s = time.perf_counter()
    step()
    return slowest_rank(time.perf_counter() - begin_s, clock)


def slowest_rank(seconds: float, clock: Collective) -> float:
    """The largest `seconds` of all ranks."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    clock.all_reduce(longest, "max").wait()
    return float(longest)


def repeat(call: Callable[[], Any], times: int) -> None:
    """Calls it so many times."""
    for _ in range(times):
        call()


def _warm(step: Callable[[], Any], clock: Collective) -> float:
    slowest(step, clock)
    return (slowest(step, clock) + slowest(step, clock)) / 2
