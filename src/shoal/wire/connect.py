"""`init`: the group of all ranks, over shared memory where they share a host, else over TCP."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence

from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.host import Apart, host_identity
from shoal.wire.board import StoreBoard
from shoal.wire.group import Alone, Group, Transport
from shoal.wire.meeting import START_S, Met, meet
from shoal.wire.memory import SharedMemory
from shoal.wire.tcp import Tcp
from shoal.wire.two_levels import TwoLevels

TIMEOUT_S = 300.0
"""How long a call waits for other ranks."""
FIRST = "wire/0"
"""Where the first group of a job's ranks meets in the store, also those with torch."""


def init(
    environ: Mapping[str, str] = os.environ, *, timeout_s: float = TIMEOUT_S, start_timeout_s: float = START_S
) -> Group:
    """The group of all ranks that the launcher started; of this process alone where there is no launcher.

    Blocks until all ranks have called it. A process calls it once; later calls are for tests, and need a store of
    their own. Raises `EnvironmentFault` and `CollectiveError` where ranks do not find each other.
    """
    return group_of(meet(environ, timeout_s=start_timeout_s), timeout_s=timeout_s)


@functools.cache
def world() -> Group:
    """The group of this process's job, which the first call makes (`init`)."""
    return init()


def group_of(met: Met, *, timeout_s: float, prefix: str = FIRST) -> Group:
    """The group of those who met under `prefix`."""
    place = met.place
    if met.connection is None:
        return Group(Alone(), ("here",))
    board = StoreBoard(met.connection, prefix, timeout_s=timeout_s)
    try:
        transport = SharedMemory(board.under("shm"), place.rank, place.world_size)
        hosts = (host_identity(),) * place.world_size
    except (Apart, CoreMissing):
        hosts = board.all_gather("hosts", _host(), rank=place.rank, ranks=range(place.world_size))
        transport = _between_hosts(met, board, hosts)
    return Group(transport, hosts, local_rank=place.local_rank)


def _between_hosts(met: Met, board: StoreBoard, hosts: Sequence[str]) -> Transport:
    rank = met.place.rank
    flat = Tcp(board.under("tcp"), rank, hosts, address=met.address, token=met.token)
    mates = [q for q, host in enumerate(hosts) if host == hosts[rank]]
    if len({hosts.count(host) for host in hosts}) > 1 or not 1 < len(mates) < len(hosts):
        return flat
    place = mates.index(rank)
    peers = [q for q, host in enumerate(hosts) if [m for m, h in enumerate(hosts) if h == host].index(q) == place]
    try:
        inside = SharedMemory(board.under(f"inside/{mates[0]}"), place, len(mates))
    except (Apart, CoreMissing):
        return flat
    across = Tcp(
        board.under(f"across/{place}"), peers.index(rank), [hosts[q] for q in peers], address=met.address,
        token=met.token,
    )  # fmt: skip
    return TwoLevels(flat, inside, across)


def _host() -> str:
    try:
        return host_identity()
    except OSError:
        return os.uname().nodename
