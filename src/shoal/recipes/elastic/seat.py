"""What the launcher tells a replica of an elastic run, by variables: its name, and where the coordinator is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.coordinator.client import Address
from shoal.coordinator.handshake import read_token
from shoal.errors import EnvironmentFault

COORDINATOR, TOKEN, REPLICA = "SHOAL_COORDINATOR", "SHOAL_COORDINATOR_TOKEN", "SHOAL_REPLICA"
LATE = "SHOAL_REPLICA_LATE"
TERMINAL_FD = "SHOAL_TERMINAL_FD"
"""The descriptor of the launcher's standard output: whichever replica is rank 0 writes there."""


@dataclass(frozen=True)
class Seat:
    """One replica's name, its coordinator, and the descriptor of the terminal. `late`: the others train already."""

    replica: str
    coordinator: Address
    terminal_fd: int
    late: bool = False


def variables_of(
    replica: str, address: Address, *, token: Path, terminal_fd: int, late: bool = False
) -> dict[str, str]:
    """What a replica finds in its environment."""
    return {
        REPLICA: replica,
        COORDINATOR: f"{address.host}:{address.port}",
        TOKEN: str(token),
        TERMINAL_FD: str(terminal_fd),
        LATE: "1" if late else "",
    }


def seat_from(environ: Mapping[str, str]) -> Seat:
    """This replica's seat. Raises `EnvironmentFault` where Shoal's launcher did not start it."""
    if missing := [name for name in (REPLICA, COORDINATOR, TOKEN, TERMINAL_FD) if not environ.get(name)]:
        raise EnvironmentFault(
            f"{missing[0]} is not set: replicas of an elastic run are started by `shoal train` alone; start it without "
            "another launcher, or remove [elastic] from the run file"
        )
    host, _, port = environ[COORDINATOR].rpartition(":")
    address = Address(host, int(port), read_token(Path(environ[TOKEN])))
    return Seat(environ[REPLICA], address, int(environ[TERMINAL_FD]), bool(environ.get(LATE)))
