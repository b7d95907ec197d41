"""One host's part of a run: its ranks, those before them on other hosts, and where rank 0 listens.

A scheduler starts one launcher on each host, and says by variables which host it is:

    scheduler                          hosts                  this one          rank 0
    torchrun's names (Kubeflow, ours)  PET_NNODES             PET_NODE_RANK     PET_MASTER_ADDR, PET_MASTER_PORT
    Slurm, one task a host             SLURM_STEP_NUM_NODES   SLURM_NODEID      the first of SLURM_STEP_NODELIST
    none                               1                      0                 loopback

`PET_NPROC_PER_NODE` says how many ranks a host has; "auto" is one a GPU. Ranks get the variables that torchrun would
give them, so that any script for torchrun runs. Unlike torchrun, the launcher keeps the exit code of the rank that
failed: a scheduler can start a job again after 75, and not after 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import EnvironmentFault, UsageError
from shoal.launcher import environment, sockets
from shoal.launcher.devices import gpus
from shoal.launcher.environment import LOOPBACK, Environ, derived_port, whole_number
from shoal.launcher.rank_process import HostEntry
from shoal.launcher.spawn import ExitCode, run_ranks
from shoal.launcher.store.messages import JOB_TOKEN
from shoal.launcher.supervision import OWN_SCRIPT

NNODES, NODE_RANK, NPROC_PER_NODE = "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
MASTER_ADDR, MASTER_PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"
MASTER_PORT_DEFAULT = 29_500
"""torchrun's own."""


@dataclass(frozen=True)
class Host:
    """Host `node_rank` of `nodes`, with `ranks` ranks like each of the others; rank 0 listens at the master address."""

    nodes: int
    node_rank: int
    ranks: int
    master_address: str
    master_port: int

    @property
    def world_size(self) -> int:
        """The ranks of all hosts."""
        return self.nodes * self.ranks

    @property
    def first_rank(self) -> int:
        """The lowest rank on this host."""
        return self.node_rank * self.ranks

    def variables(self, rank: int) -> dict[str, str]:
        """What `rank` of this host finds in its environment: torchrun's names."""
        place = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank - self.first_rank,
            "LOCAL_WORLD_SIZE": self.ranks,
            "GROUP_RANK": self.node_rank,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
            # Empty: the script is the user's own, and goes on after a call of `shoal.train`, as under torchrun.
            "SHOAL_LAUNCHER": "",
        }
        return {name: str(value) for name, value in place.items()}


def host_from(environ: Environ, *, ranks: int | None = None) -> Host:
    """This host, as the scheduler's variables say; `ranks` on each host, where the caller knows better.

    Raises `EnvironmentFault` where the variables contradict each other or leave something out.
    """
    if NNODES in environ:
        nodes, node_rank = whole_number(environ, NNODES), whole_number(environ, NODE_RANK, 0)
    elif _slurm_task_a_host(environ):
        nodes, node_rank = whole_number(environ, "SLURM_STEP_NUM_NODES"), whole_number(environ, "SLURM_NODEID")
    else:
        nodes, node_rank = 1, 0
    if node_rank >= nodes:
        raise EnvironmentFault(
            f"this is host {node_rank} of {nodes}: hosts count from 0 to one less than their number; "
            f"set {NNODES} and {NODE_RANK}, or unset those of an outer job"
        )
    return Host(nodes, node_rank, ranks or _ranks(environ), *_master(environ, nodes))


def run_host(command: Sequence[str], host: Host, *, directory: Path, environ: Environ) -> ExitCode:
    """Run `command` as the ranks of this host, and return the exit code of the first that failed.

    Rank 0 keeps the terminal; the others write to `directory/logs`. Raises `EnvironmentFault` where ranks cannot be
    started.
    """
    environ = job_environ(environ, host, directory)
    return run_ranks(
        command,
        processes=host.ranks,
        run_directory=directory,
        environ=environ,
        entry_of=lambda rank: HostEntry((), host.variables(rank)),
        first_rank=host.first_rank,
        world_size=host.world_size,
        patience=OWN_SCRIPT,
    )


def job_environ(environ: Environ, host: Host, directory: Path) -> Environ:
    """`environ` with the interface of one host, or the token's file of several: in the folder that all hosts see."""
    if host.nodes == 1 and not environ.get("GLOO_SOCKET_IFNAME"):
        return {**environ, "GLOO_SOCKET_IFNAME": sockets.interface_name()}
    if host.nodes > 1 and not environ.get(JOB_TOKEN):
        directory.mkdir(parents=True, exist_ok=True)
        return {**environ, JOB_TOKEN: str((directory / "token").absolute())}
    return environ


def _slurm_task_a_host(environ: Environ) -> bool:
    """Whether a step of Slurm's started this launcher, one on each host. Raises `UsageError` for several on a host."""
    if "SLURM_STEP_NUM_NODES" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return False
    nodes, tasks = (whole_number(environ, f"SLURM_STEP_NUM_{kind}") for kind in ("NODES", "TASKS"))
    if tasks > nodes:
        raise UsageError(
            f"srun started {tasks} launchers on {nodes} hosts: one launcher starts all ranks of a host; "
            "give srun --ntasks-per-node=1, or start the script itself with a task a rank"
        )
    return "SLURM_NODEID" in environ


def _ranks(environ: Environ) -> int:
    text = environ.get(NPROC_PER_NODE, "auto")
    if text in ("auto", "gpu"):
        return max(1, gpus(environ))
    return whole_number(environ, NPROC_PER_NODE)


def _master(environ: Environ, nodes: int) -> tuple[str, int]:
    if nodes == 1:
        # Free a moment ago; a script's own store may listen there, so it cannot be held open for it.
        with sockets.listen_on_loopback() as listener:
            return LOOPBACK, listener.getsockname()[1]
    address = environ.get(MASTER_ADDR) or environ.get("MASTER_ADDR")
    for name in (MASTER_PORT, "MASTER_PORT"):
        if environ.get(name):
            port: int | None = whole_number(environ, name)
            break
    else:
        port = derived_port(environ) if "SLURM_JOB_ID" in environ else MASTER_PORT_DEFAULT
    if not address and environ.get("SLURM_STEP_NODELIST"):
        address = environment.hosts(environ["SLURM_STEP_NODELIST"])[0]
    if not address:
        raise EnvironmentFault(
            f"{MASTER_ADDR} is missing: the ranks of {nodes} hosts meet at rank 0's; set it on every host"
        )
    return address, port
