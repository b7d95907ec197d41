"""`shoal doctor --hosts ranks`: the processes that a launcher has started look at their own hosts.

    srun --nodes=4 --ntasks-per-node=1 shoal doctor --hosts ranks
    torchrun --nnodes=4 --nproc-per-node=1 ... -m shoal doctor --hosts ranks

Rank 0 is the doctor. It listens at MASTER_ADDR and MASTER_PORT, where the first process of each host comes, as the
ranks of a run would: a host that does not come is the first finding.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from functools import partial

import msgspec

from shoal.errors import EnvironmentFault
from shoal.launch import sockets
from shoal.launch.environment import Environ, Place, master_from
from shoal.launch.survey.channel import SocketChannel
from shoal.launch.survey.messages import Host
from shoal.launch.survey.probe import serve
from shoal.launch.survey.visit import Survey, surveyed

COME_S = 60.0
_LOOK_S = 0.2


class _Arrival(msgspec.Struct, frozen=True):
    node_rank: int
    host_name: str


def survey_of_ranks(place: Place, environ: Environ, *, come_s: float = COME_S) -> Survey | None:
    """What the ranks found of their hosts; None on all but rank 0.

    Hosts that do not come within `come_s` seconds are `silent`. Raises `EnvironmentFault` where rank 0 cannot listen,
    and on the others where they cannot reach it.
    """
    address, port = master_from(environ)
    if place.rank != 0:
        if place.local_rank == 0:
            _come(address, port, place, environ, come_s)
        return None
    with sockets.listen_at(address, port, one_host=place.one_host) as listener:
        # Rank 0's own host is looked at by the same way.
        own = "127.0.0.1" if listener.getsockname()[0] in ("0.0.0.0", "::") else listener.getsockname()[0]
        threading.Thread(target=_come, args=(own, port, place, environ, come_s), daemon=True).start()
        count = place.world_size // place.local_world_size
        came = _arrivals(listener, count, come_s)
    names = _names({rank: arrival.host_name for rank, (arrival, _) in came.items()})
    hosts = [Host(names[rank], _address(came[rank][1], address)) for rank in sorted(came)]
    openers = {names[rank]: partial(SocketChannel, connection) for rank, (_, connection) in came.items()}
    found = surveyed(hosts, openers, folder=None, port=0)
    missing = {
        f"host {rank}": f"it did not come to {address}:{port} within {come_s:.0f} s"
        for rank in range(count)
        if rank not in came
    }
    absent = tuple(Host(name, "") for name in missing)
    return Survey((*found.hosts, *absent), found.port, found.facts, {**found.silent, **missing}, found.links)


def _come(address: str, port: int, place: Place, environ: Environ, come_s: float) -> None:
    end_s = time.monotonic() + come_s
    while True:
        try:
            connection = socket.create_connection((address, port), come_s)
            break
        except OSError as error:
            if time.monotonic() > end_s:
                raise EnvironmentFault(
                    f"nothing answers at {address}:{port} ({error.strerror or error}): rank 0 listens there; set "
                    "MASTER_ADDR and MASTER_PORT alike on every host, and allow TCP to that port"
                ) from error
            time.sleep(_LOOK_S)
    with connection:
        connection.settimeout(None)
        connection.sendall(msgspec.json.encode(_Arrival(place.node_rank, socket.gethostname())) + b"\n")
        serve(connection.makefile("rb"), connection.makefile("wb"), environ)


def _arrivals(listener: socket.socket, count: int, come_s: float) -> dict[int, tuple[_Arrival, socket.socket]]:
    """By host, what it said first, and its connection. Whoever says something else is sent away."""
    found: dict[int, tuple[_Arrival, socket.socket]] = {}
    end_s = time.monotonic() + come_s
    while len(found) < count and (left_s := end_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        connection.settimeout(5.0)
        arrival = None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            arrival = msgspec.json.decode(_line(connection), type=_Arrival)
        if arrival is None or arrival.node_rank in found:
            connection.close()
            continue
        connection.settimeout(None)
        found[arrival.node_rank] = (arrival, connection)
    return found


def _line(connection: socket.socket) -> bytes:
    """Byte by byte: what follows the line is the channel's."""
    found = bytearray()
    while not found.endswith(b"\n") and len(found) < 1000 and (byte := connection.recv(1)):
        found += byte
    return bytes(found)


def _names(host_names: dict[int, str]) -> dict[int, str]:
    """Of each host by its number: what it calls itself, with the number where two are called alike."""
    called = list(host_names.values())
    return {rank: name if called.count(name) == 1 else f"{name}-{rank}" for rank, name in sorted(host_names.items())}


def _address(connection: socket.socket, master: str) -> str:
    """Where the peers find the host: from where it came; the doctor's own host, at the master's address."""
    came_from = connection.getpeername()[0]
    return master if ipaddress.ip_address(came_from.partition("%")[0]).is_loopback else came_from
