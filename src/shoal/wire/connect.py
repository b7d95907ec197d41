"""`init`: the group of all ranks, over shared memory where they share a host, else over TCP."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from shoal.comm.ledger import Sent
from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.host import Apart, host_identity
from shoal.errors import UsageError
from shoal.launcher import sockets
from shoal.launcher.environment import ALONE, FIRST_PORT, LOOPBACK, PORTS, STORE_FD, Place, master_from, place_from
from shoal.launcher.store.connection import StoreConnection, meet_over_mpi, mpi_is_there, reach_store
from shoal.launcher.store.messages import job_token
from shoal.wire.arrays import Array
from shoal.wire.board import StoreBoard
from shoal.wire.group import Alone, Group, Transport
from shoal.wire.memory import SharedMemory
from shoal.wire.tcp import Tcp

# Where the ranks of any launcher meet, without torch: one store, hosted by rank 0.
#
#     launcher        where                                                   token
#     shoal           MASTER_ADDR, on the socket that the launcher bound      the launcher's
#     torchrun        MASTER_ADDR, at a port that follows from the run's id   the user's own, or SHOAL_JOB_TOKEN's
#     slurm, mpi      as `shoal.launcher.rendezvous`                            the same
#     none            nowhere: a process alone
#
# torchrun's agents keep the port that they announce for a store of their own, which speaks PyTorch's protocol.


START_S = 600.0
"""How long ranks wait for each other at the start."""


class Met(NamedTuple):
    """This process's place, its connection to the store, the job's token, and this host's address for the others.

    Of a process alone, `connection` is None.
    """

    place: Place
    connection: StoreConnection | None
    token: bytes
    address: str


def meet(environ: Mapping[str, str] = os.environ, *, timeout_s: float = START_S) -> Met:
    """Connects this rank; rank 0 hosts the store.

    Raises `EnvironmentFault` where the variables contradict each other, `InUse` for a port that is taken, and
    `CollectiveError` where rank 0 does not come.
    """
    place = place_from(environ) or ALONE
    if place.world_size == 1:
        return Met(place, None, b"", LOOPBACK)
    if place.launcher == "mpi" and not environ.get("MASTER_PORT") and mpi_is_there():
        address, port, token, listen_fd = meet_over_mpi(place, environ, timeout_s=timeout_s)
    else:
        address, port = _store_at(environ)
        token, listen_fd = job_token(environ), None
        if place.rank == 0:
            own = environ.get(STORE_FD)
            listen_fd = int(own) if own else sockets.listen_at(address, port, one_host=place.one_host).detach()
    connection = reach_store(place, address, port, token=token, timeout_s=timeout_s, listen_fd=listen_fd)
    own_address = LOOPBACK if place.one_host else sockets.address_towards(address, port)
    return Met(place, connection, token, own_address)


def _store_at(environ: Mapping[str, str]) -> tuple[str, int]:
    address, port = master_from(environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        run = (environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "0"), port)
        port = FIRST_PORT + zlib.crc32(repr(run).encode()) % PORTS
    return address, port


# `TwoLevels`: ranks on several hosts, as many on each. Sums go through shared memory inside a host.
#
#     all_reduce    reduce-scatter inside each host, all-reduce of each part between the ranks that have it, all-gather
#                   inside: 2 (m-1)/m S leaves each of m hosts; a sum over TCP alone sends n times as much from n ranks
#     others        over TCP between all ranks
#
# Hosts have as many ranks each, so that a mean is the mean of their means: float16 would overflow in a sum.
# Sums run over the ranks of a host, then over hosts: the same bits on all ranks, but not those of a sum in rank order.


class TwoLevels:
    """`flat` joins all ranks, `inside` those of this host, `across` those with this rank's place on each host."""

    def __init__(self, flat: Tcp, inside: SharedMemory, across: Tcp) -> None:
        self.rank, self.size = flat.rank, flat.size
        self._flat, self._inside, self._across = flat, inside, across

    def all_reduce(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent:
        mates = self._inside.size
        each = -(-send.size // mates)
        padded = np.zeros(each * mates, send.dtype)
        padded[: send.size] = send.reshape(-1)
        part = np.empty(each, send.dtype)
        sent = [self._inside.reduce_scatter(padded, part, op, mark), self._across.all_reduce(part, part, op, mark)]
        sent.append(self._inside.all_gather(part, padded, mark))
        receive.reshape(-1)[...] = padded[: send.size]
        return Sent(sum(s.inside_bytes for s in sent), sum(s.between_bytes for s in sent))

    def reduce_scatter(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent:
        return self._flat.reduce_scatter(send, receive, op, mark)

    def all_gather(self, send: Array, receive: Array, mark: int = 0) -> Sent:
        return self._flat.all_gather(send, receive, mark)

    def broadcast(self, array: Array, root: int, mark: int = 0) -> Sent:
        return self._flat.broadcast(array, root, mark)

    def all_to_all(self, send: Sequence[Array], receive: Sequence[Array], mark: int = 0) -> Sent:
        return self._flat.all_to_all(send, receive, mark)

    def send(self, array: Array, to: int, tag: int) -> Sent:
        return self._flat.send(array, to, tag)

    def receive(self, array: Array, source: int, tag: int) -> Sent:
        return self._flat.receive(array, source, tag)

    def barrier(self) -> Sent:
        return self._flat.barrier()

    def close(self) -> None:
        """Ends all three."""
        for transport in (self._flat, self._inside, self._across):
            transport.close()


TIMEOUT_S = 300.0
"""How long a call waits for other ranks."""
FIRST = "wire/0"
"""Where the first group of a job's ranks meets in the store, also those with torch."""


def init(
    environ: Mapping[str, str] | None = None, *, timeout_s: float | None = None, start_timeout_s: float = START_S
) -> Group:
    """The group of all ranks that the launcher started; of this process alone where there is no launcher.

    Blocks until all ranks have called it. Later calls give the same group, which `shoal.jax` and `shoal.keras` use as
    well; a new one where it was closed. `environ`: in the place of this process's environment, for tests, each of which
    needs a store of its own. `timeout_s`: of every call of the group, `TIMEOUT_S` where it is left out.
    `start_timeout_s`: how long ranks wait for each other here. Raises `EnvironmentFault` and `CollectiveError` where
    ranks do not find each other, and `UsageError` for another timeout than that of the group which is there.
    """
    if environ is not None:
        met = meet(environ, timeout_s=start_timeout_s)
        return group_of(met, timeout_s=timeout_s or TIMEOUT_S, start_timeout_s=start_timeout_s)
    here, made = _here(), _here().groups
    if made and not made[-1].closed:
        if timeout_s not in (None, here.timeout_s):
            raise UsageError(
                f"wire.init(timeout_s={timeout_s:g}) after the group was made, with {here.timeout_s:g} s: call it "
                "before world() and all that uses the group, or close the group first"
            )
    else:
        here.timeout_s = timeout_s or TIMEOUT_S
        prefix = FIRST if not made else f"{FIRST}/{len(made)}"
        met = met_here(timeout_s=start_timeout_s)
        made.append(group_of(met, timeout_s=here.timeout_s, prefix=prefix, start_timeout_s=start_timeout_s))
    return made[-1]


def world() -> Group:
    """The group of this process's job, which the first call makes (`init`)."""
    return init()


def met_here(*, timeout_s: float = START_S) -> Met:
    """As `meet`, with the ranks of this process's launcher: once, for all who ask."""
    here = _here()
    here.met = here.met or meet(timeout_s=timeout_s)
    return here.met


@dataclass
class _Here:
    """What this process has made of its environment."""

    met: Met | None = None
    timeout_s: float = TIMEOUT_S
    groups: list[Group] = field(default_factory=list)


@functools.cache
def _here() -> _Here:
    return _Here()


def group_of(met: Met, *, timeout_s: float, prefix: str = FIRST, start_timeout_s: float = START_S) -> Group:
    """The group of those who met under `prefix`, who wait for each other for `start_timeout_s`."""
    place = met.place
    if met.connection is None:
        return Group(Alone(), ("here",))
    board = StoreBoard(met.connection, prefix, timeout_s=start_timeout_s)
    try:
        transport = SharedMemory(board.under("shm"), place.rank, place.world_size, timeout_s=timeout_s)
        hosts = (host_identity(),) * place.world_size
    except (Apart, CoreMissing):
        hosts = board.all_gather("hosts", _host(), rank=place.rank, ranks=range(place.world_size))
        transport = _between_hosts(met, board, hosts, timeout_s=timeout_s)
    return Group(transport, hosts, local_rank=place.local_rank)


def _between_hosts(met: Met, board: StoreBoard, hosts: Sequence[str], *, timeout_s: float) -> Transport:
    rank = met.place.rank
    over_tcp = partial(Tcp, address=met.address, token=met.token, timeout_s=timeout_s)
    flat = over_tcp(board.under("tcp"), rank, hosts)
    mates = [q for q, host in enumerate(hosts) if host == hosts[rank]]
    if len({hosts.count(host) for host in hosts}) > 1 or not 1 < len(mates) < len(hosts):
        return flat
    place = mates.index(rank)
    peers = [q for q, host in enumerate(hosts) if [m for m, h in enumerate(hosts) if h == host].index(q) == place]
    try:
        inside = SharedMemory(board.under(f"inside/{mates[0]}"), place, len(mates), timeout_s=timeout_s)
    except (Apart, CoreMissing):
        return flat
    across = over_tcp(board.under(f"across/{place}"), peers.index(rank), [hosts[q] for q in peers])
    return TwoLevels(flat, inside, across)


def _host() -> str:
    try:
        return host_identity()
    except OSError:
        return os.uname().nodename
