"""The processes of replicas: how those of one are started, and how they end.

The ranks of a replica live and die together: when one has ended otherwise than by being done or stopped, the others are
ended, and the replica's end is that of the first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.coordinator.client import Address
from shoal.errors import EnvironmentFault, UsageError
from shoal.launcher import sockets
from shoal.launcher.devices import cores
from shoal.launcher.environment import STORE_FD, whole_number
from shoal.launcher.handshake import read_token
from shoal.launcher.rank_process import RankProcess, rank_environment, start
from shoal.launcher.root_cause import Exit
from shoal.resilience.config import COORDINATOR

# What the launcher assigns to a rank of an elastic run, by variables: its replica, and where the coordinator is.


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


QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""A store that went with its replica is no news: PyTorch would warn of it with a page of its own frames."""


@dataclass
class ReplicaProcesses:
    """The ranks of one replica. `late`: those that have not started in time. `sent` are the signals by which the run
    ends: who dies by one has not failed.
    """

    name: str
    slot: int
    ranks: list[RankProcess]
    started_s: float = field(default_factory=time.monotonic)
    late: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    exits: list[Exit] = field(default_factory=list)
    _ending: set[int] = field(default_factory=set)

    def send(self, number: signal.Signals, *, as_end: bool = False) -> None:
        """A signal to all ranks that run; `as_end`: with it, the run ends."""
        if as_end:
            self.sent.add(number)
        for process in self.ranks:
            if process.process.returncode is None:
                process.send(number)

    def ended(self, process: RankProcess) -> None:
        """One of the ranks has ended: reaps it, and ends the others where they have nobody to go on with."""
        code = process.reap()
        by_launcher = process.rank in self._ending or any(code in (-number, 128 + number) for number in self.sent)
        end = Exit(process.rank, process.pid, code, time.time_ns(), by_launcher=by_launcher)
        self.exits.append(end)
        if end.failed and not self._ending:
            left = [other for other in self.ranks if other.process.returncode is None]
            self._ending |= {other.rank for other in left}
            for other in left:
                other.send(signal.SIGKILL)

    @property
    def is_over(self) -> bool:
        """Whether none of its processes is left."""
        return len(self.exits) == len(self.ranks)

    @property
    def end(self) -> Exit:
        """That of the first rank which failed; of the first one where none did."""
        return next((end for end in self.exits if end.failed), self.exits[0])


@dataclass(frozen=True)
class Starter:
    """How a replica of `ranks` ranks is started. `slots`: the most that are on this host at once; `host`: its address,
    which replicas on other hosts reach if there are `several_hosts`. `coordinator` are variables.
    """

    command: list[str]
    ranks: int
    slots: int
    host: str
    several_hosts: bool
    run_directory: Path
    environ: Mapping[str, str]
    coordinator: Mapping[str, str]
    fds: Sequence[int]
    terminal_fd: int

    def start(self, slot: int, name: str, *, late: bool) -> ReplicaProcesses:
        """The processes of replica `name` in `slot`; `late`: others train already. Raises `EnvironmentFault`."""
        interface = sockets.interface_of(self.host)
        shared = {**QUIET, **({"GLOO_SOCKET_IFNAME": interface} if interface else {}), **self.environ}
        shared |= dict(self.coordinator) | replica_variables(
            name, ranks=self.ranks, terminal_fd=self.terminal_fd, late=late, several_hosts=self.several_hosts
        )
        processes: list[RankProcess] = []
        with sockets.listen_at(self.host, 0, one_host=True) as listener:
            port, store_fd = listener.getsockname()[1], listener.fileno()
            for inside in range(self.ranks):
                rank = slot * self.ranks + inside
                own = rank_environment(shared, rank, processes=self.slots * self.ranks, port=port, cores=cores())
                own |= {"MASTER_ADDR": self.host, RANK_INSIDE: str(inside)}
                own |= {STORE_FD: str(store_fd)} if inside == 0 else {}
                fds = (*self.fds, store_fd) if inside == 0 else self.fds
                processes.append(start(self.command, rank, environ=own, run_directory=self.run_directory, pass_fds=fds))
        return ReplicaProcesses(name, slot, processes)
