"""The processes of replicas: how those of one are started, and how they end.

The ranks of a replica live and die together: when one has ended otherwise than by being done or stopped, the others are
ended, and the replica's end is that of the first.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.fleet.assignment import RANK_INSIDE, replica_variables
from shoal.launch import sockets
from shoal.launch.environment import STORE_FD
from shoal.launch.rank_process import RankProcess, rank_environment, start
from shoal.launch.root_cause import Exit

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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
                own = rank_environment(shared, rank, processes=self.slots * self.ranks, port=port, cores=cores)
                own |= {"MASTER_ADDR": self.host, RANK_INSIDE: str(inside)}
                own |= {STORE_FD: str(store_fd)} if inside == 0 else {}
                fds = (*self.fds, store_fd) if inside == 0 else self.fds
                processes.append(start(self.command, rank, environ=own, run_directory=self.run_directory, pass_fds=fds))
        return ReplicaProcesses(name, slot, processes)
