"""In which order hosts get their ranks, from the links between them: neighbours in rank order are near each other.

    shoal launch --order measured script.py          # one launcher on each host, as under srun

Rings over ranks send from each rank to the next, and groups of consecutive ranks (a shard of ZeRO, a pipeline) stay
among neighbours. So the launchers measure latency and rate of every link in both directions, round by round, and
number the hosts along the best ring (`ring`: searched whole up to 8 hosts). Host 0 keeps its place: rank 0 is where
MASTER_ADDR says. All launchers compute the order from the same figures, so they agree.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

import msgspec

from shoal.errors import EnvironmentFault
from shoal.launcher import sockets
from shoal.launcher.environment import Environ, Place
from shoal.launcher.host import Host
from shoal.launcher.store.connection import StoreConnection, StoreLate, StoreLost, reach_store
from shoal.launcher.store.messages import job_token
from shoal.launcher.supervision import say
from shoal.launcher.survey.probe import listening, measure
from shoal.topology.links import Links, best_order, pace

COME_S = 120.0
ROUND_S = 60.0
SIZE_BYTES = 1 << 20
"""Of the messages for which the order is the best."""
ALIKE, ALIKE_BUSY = 1.1, 1.5
"""Measurements of links that are alike differ by less than this factor; and on hosts that are busy."""
_SETTLE_S = 0.2


class _Door(msgspec.Struct, frozen=True):
    """Where a launcher answers measurements."""

    address: str
    port: int


class _Found(msgspec.Struct, frozen=True):
    """A link from one host, measured: seconds one way, bytes a second. `obstacle`: why not."""

    latency_s: float = 0.0
    bytes_s: float = 0.0
    obstacle: str | None = None


@dataclass(frozen=True)
class HostOrder:
    """The hosts along the ring, and the links that say so. Place p of the ring has the host `order[p]`."""

    order: tuple[int, ...]
    links: Links

    def place(self, host: Host) -> Host:
        """`host` with its place on the ring as its node rank."""
        return replace(host, node_rank=self.order.index(host.node_rank))


def along_the_ring(host: Host, environ: Environ) -> Host:
    """`host` with its place in the measured order, which host 0 says on standard error."""
    found = measured_order(host, token=job_token(environ))
    if host.node_rank == 0:
        say("hosts along the ring: " + " ".join(map(str, found.order)))
    return found.place(host)


def measured_order(host: Host, *, token: bytes) -> HostOrder:
    """The order of all hosts; every host's launcher calls it, and gets the same.

    Raises `EnvironmentFault` where a launcher does not come, or a host cannot reach another.
    """
    place = Place(host.node_rank, host.nodes, 0, 1, host.node_rank, "none")
    listener = None
    if host.node_rank == 0:
        listener = sockets.listen_at(host.master_address, host.master_port, one_host=False).detach()
    store = reach_store(
        place, host.master_address, host.master_port, token=token, timeout_s=COME_S, listen_fd=listener
    )  # fmt: skip
    try:
        return _measured(host, store)
    except (StoreLate, StoreLost) as error:
        raise EnvironmentFault(
            f"host {host.node_rank} of {host.nodes} could not find the order of hosts ({error}): start a launcher on "
            "each host, or leave --order out"
        ) from None
    finally:
        _leave(host, store)


def _measured(host: Host, store: StoreConnection) -> HostOrder:
    me, everyone = host.node_rank, [str(node) for node in range(host.nodes)]
    own = sockets.address_towards(host.master_address, host.master_port)
    if me == 0:
        store.ask("set", ["order/token"], [secrets.token_hex(16)])
    token = store.get_all(["order/token"], timeout_s=COME_S)[0].decode()
    with listening(0, token) as (port, _):
        store.ask("set", [f"order/door/{me}"], [msgspec.json.encode(_Door(own, port))])
        texts = store.get_all([f"order/door/{node}" for node in everyone], timeout_s=COME_S)
        doors = [msgspec.json.decode(text, type=_Door) for text in texts]
        for shift in range(1, host.nodes):  # in a round each host measures one link, and is the target of one
            target = (me + shift) % host.nodes
            found = _link(doors[target], token)
            store.ask("set", [f"order/link/{me}/{target}"], [msgspec.json.encode(found)])
            store.ask("set", [f"order/round/{shift}/{me}"], [b""])
            store.get_all([f"order/round/{shift}/{node}" for node in everyone], timeout_s=ROUND_S)
    links = _links(host.nodes, store)
    return HostOrder(ring(links), links)


def ring(links: Links) -> tuple[int, ...]:
    """The hosts along the best ring, host 0 first. Groups of consecutive ranks begin at rank 0: of the two ways around,
    where links are alike in both directions, the one that goes to host 0's nearer neighbour first."""
    order = best_order(links, size=SIZE_BYTES, alike=ALIKE)
    back = (order[0], *order[:0:-1])
    there_s, back_s = (pace(links, way, size=SIZE_BYTES)[0] for way in (order, back))
    if back_s > ALIKE_BUSY * there_s:
        return order
    return min(order, back, key=lambda way: links.seconds(way[0], way[1], SIZE_BYTES))


def _link(door: _Door, token: str) -> _Found:
    found = measure(door.address, door.port, token)
    return _Found(found.round_trip_s / 2, found.bytes_per_s, found.obstacle)


def _links(nodes: int, store: StoreConnection) -> Links:
    pairs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    texts = store.get_all([f"order/link/{a}/{b}" for a, b in pairs], timeout_s=ROUND_S)
    found = dict(zip(pairs, (msgspec.json.decode(text, type=_Found) for text in texts), strict=True))
    for (a, b), link in found.items():
        if link.obstacle is not None:
            raise EnvironmentFault(
                f"host {a} cannot reach host {b} ({link.obstacle}): allow TCP between all hosts; see `shoal doctor "
                "--hosts`"
            )
    hosts = range(nodes)
    latency = tuple(tuple(found[a, b].latency_s if a != b else 0.0 for b in hosts) for a in hosts)
    rate = tuple(tuple(found[a, b].bytes_s if a != b else 1.0 for b in hosts) for a in hosts)
    return Links(latency, rate, tuple(hosts))


def _leave(host: Host, store: StoreConnection) -> None:
    """Host 0 ends the store, whose port rank 0 needs, when all have what they came for."""
    try:
        store.ask("add", ["order/left"], amount=1)
        end_s = time.monotonic() + _SETTLE_S * 50
        while host.node_rank == 0 and store.ask("add", ["order/left"]).amount < host.nodes and time.monotonic() < end_s:
            time.sleep(_SETTLE_S / 10)
    except StoreLost:
        pass
    store.close()
