"""What the doctor and its probes say to each other: one JSON object a line.

doctor            probe
Begin      ->                who it is, whom it will meet
           <-   HostFacts    what the host tells of itself, and the port at which it listens
Measure    ->                one peer
           <-   Link         the link towards it
(end of input)               the probe ends
"""

from __future__ import annotations

import msgspec

from shoal.launcher.doctor import Finding


class Host(msgspec.Struct, frozen=True):
    """A host as the doctor was told of it. `address` is how its peers are to reach it: a name or a number."""

    name: str
    address: str


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message. `hosts[0]` is the master, which listens at `port`; only who knows `token` is answered there.

    `folder` is where the run is to be started; None: where the probe runs.
    """

    name: str
    hosts: list[Host]
    port: int
    token: str
    folder: str | None


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Asks for the link towards a peer; without `rate` for its pings alone."""

    peer: Host
    port: int
    rate: bool


class Route(msgspec.Struct, frozen=True):
    """How a host reaches the master: its own address there, and the interface that has it.

    `mtu_bytes` and `speed_mbit` are None where the kernel does not tell. `obstacle` says why there is no route.
    """

    address: str = ""
    interface: str | None = None
    mtu_bytes: int | None = None
    speed_mbit: int | None = None
    obstacle: str | None = None


class Leftover(msgspec.Struct, frozen=True):
    """A process of a run that is there already."""

    pid: int
    command: str
    age_s: float


class HostFacts(msgspec.Struct, frozen=True):
    """What a host tells of itself.

    `port` is where its probe listens, `port_fault` says why that is not the port of the master. `addresses` holds what
    each host's address resolves to here; an empty list: nothing. `versions` and `limits` are by name.
    """

    host_name: str
    port: int
    port_fault: str | None
    route: Route
    addresses: dict[str, list[str]]
    versions: dict[str, str]
    code: str
    folder: str
    folder_free_bytes: int | None
    limits: dict[str, int]
    variables: dict[str, str]
    leftovers: list[Leftover]
    findings: list[Finding]


class SurveyedLink(msgspec.Struct, frozen=True):
    """The link from one host to another, over one TCP connection. `obstacle`: why there was none, and no figures.

    `round_trip_s` is the median of pings, `ahead_s` how far the peer's clock is ahead, known to half of the shortest
    round trip, `bytes_per_s` what was sent and acknowledged.
    """

    obstacle: str | None = None
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    ahead_s: float = 0.0
