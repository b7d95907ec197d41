"""What the launcher assigns to a rank of an elastic run, by variables: its replica, and where the coordinator is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.coordinator.client import Address
from shoal.errors import EnvironmentFault, UsageError
from shoal.launch.environment import whole_number
from shoal.launch.handshake import read_token
from shoal.resilience.config import COORDINATOR

TOKEN, CERTIFICATES = "SHOAL_COORDINATOR_TOKEN", "SHOAL_COORDINATOR_CA"
REPLICAS_HERE = "SHOAL_REPLICAS_HERE"
"""How many replicas the launcher of one host of several starts."""
REPLICA, RANKS, RANK_INSIDE = "SHOAL_REPLICA", "SHOAL_REPLICA_RANKS", "SHOAL_REPLICA_RANK"
LATE, SEVERAL_HOSTS = "SHOAL_REPLICA_LATE", "SHOAL_REPLICA_HOSTS"
TERMINAL_FD = "SHOAL_TERMINAL_FD"
"""The descriptor of the launcher's standard output: whichever rank is rank 0 writes there."""


@dataclass(frozen=True)
class Assignment:
    """Rank `rank` of the `ranks` of one replica, its coordinator, and the descriptor of the terminal.

    `late`: other replicas train already. `several_hosts`: replicas on other hosts may join.
    """

    replica: str
    coordinator: Address
    terminal_fd: int
    rank: int = 0
    ranks: int = 1
    late: bool = False
    several_hosts: bool = False


def coordinator_variables(address: Address, token: Path) -> dict[str, str]:
    """How processes of this host find the coordinator."""
    found = {COORDINATOR: f"{address.host}:{address.port}", TOKEN: str(token)}
    return found if address.certificates is None else {**found, CERTIFICATES: address.certificates}


def coordinator_from(environ: Mapping[str, str]) -> Address | None:
    """The coordinator that these variables name; None where they name none. Raises `UsageError` for no address."""
    where = environ.get(COORDINATOR)
    if not where:
        return None
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"'{where}' is no address: it is HOST:PORT, as `shoal coordinator serve` prints it")
    if not environ.get(TOKEN):
        raise UsageError(f"the coordinator at {where} asks for the job's token: name its file (--token FILE)")
    return Address(host.strip("[]"), int(port), read_token(Path(environ[TOKEN])), environ.get(CERTIFICATES))


def replicas_here(environ: Mapping[str, str]) -> int:
    """How many replicas the launcher of one host of several starts. Raises `EnvironmentFault` for no whole number."""
    return max(1, whole_number(environ, REPLICAS_HERE, 1))


def replica_variables(replica: str, *, ranks: int, terminal_fd: int, late: bool, several_hosts: bool) -> dict[str, str]:
    """What every rank of a replica finds in its environment, beside the coordinator."""
    return {
        REPLICA: replica,
        RANKS: str(ranks),
        TERMINAL_FD: str(terminal_fd),
        LATE: "1" if late else "",
        SEVERAL_HOSTS: "1" if several_hosts else "",
    }


def assignment_from(environ: Mapping[str, str]) -> Assignment:
    """This rank's. Raises `EnvironmentFault` where Shoal's launcher did not start it."""
    coordinator = coordinator_from(environ)
    if coordinator is None or any(not environ.get(name) for name in (REPLICA, RANKS, RANK_INSIDE, TERMINAL_FD)):
        raise EnvironmentFault(
            f"{REPLICA} is not set: replicas of an elastic run are started by `shoal train` alone; start it without "
            "another launcher, or remove [elastic] from the run file"
        )
    return Assignment(
        environ[REPLICA],
        coordinator,
        whole_number(environ, TERMINAL_FD),
        rank=whole_number(environ, RANK_INSIDE),
        ranks=whole_number(environ, RANKS),
        late=bool(environ.get(LATE)),
        several_hosts=bool(environ.get(SEVERAL_HOSTS)),
    )
