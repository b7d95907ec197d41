"""Table `[wire]`: what the ranks talk over. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from shoal.config.check import Table, says
from shoal.errors import EnvironmentFault

# Which backend a group of ranks uses, by written criteria.
#
# Ranks first tell each other what they can use; all see the same capabilities, so all make the same choice. Every
# choice has a sentence that says why.


TransportName = Literal["auto", "gloo", "shm", "hierarchical", "mpi"]
"""What a user may ask for (`wire.transport`); between GPUs `gloo` alone is no other than `auto`."""

Backend = Literal["nccl", "shm", "hierarchical", "mpi", "gloo"]


class RankCapabilities(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank can use. `core` tells builds of the C core apart; `no_core` and `no_mpi` are the reasons why the
    rank has no core or no MPI, empty where it has; `by_mpi`: mpiexec started it; `gpu` is the identity of its GPU."""

    host: str
    core: str = ""
    no_core: str = ""
    no_mpi: str = ""
    by_mpi: bool = False
    gpu: str = ""


@dataclass(frozen=True)
class Capabilities:
    """What the ranks of a group can all use. `hosts` are the identities of their hosts, in rank order, and `gpus` those
    of their GPUs, empty where nobody knows."""

    device: Literal["cpu", "cuda"]
    hosts: tuple[str, ...]
    no_core: str = ""
    no_mpi: str = ""
    by_mpi: bool = False
    gpus: tuple[str, ...] = ()

    @staticmethod
    def of_all(ranks: Sequence[RankCapabilities], *, device: Literal["cpu", "cuda"]) -> Capabilities:
        """Joins those of each rank, in rank order: what one rank lacks, the group lacks."""
        no_core = next((rank.no_core for rank in ranks if rank.no_core), "")
        if not no_core and len({rank.core for rank in ranks}) > 1:
            no_core = "the ranks have different versions of the shared-memory core: install one version on all hosts"
        return Capabilities(
            device=device,
            hosts=tuple(rank.host for rank in ranks),
            no_core=no_core,
            no_mpi=next((rank.no_mpi for rank in ranks if rank.no_mpi), ""),
            by_mpi=all(rank.by_mpi for rank in ranks),
            gpus=tuple(rank.gpu for rank in ranks) if any(rank.gpu for rank in ranks) else (),
        )

    @property
    def on_one_gpu(self) -> tuple[int, int] | None:
        """The first two ranks that have one GPU; None where there are none."""
        first: dict[str, int] = {}
        for rank, gpu in enumerate(self.gpus):
            if gpu and first.setdefault(gpu, rank) != rank:
                return first[gpu], rank
        return None

    @property
    def host_count(self) -> int:
        """How many hosts there are."""
        return len(set(self.hosts))


@dataclass(frozen=True)
class BackendChoice:
    """A backend, and for people the reason why it is that one."""

    backend: Backend
    why: str


def choose_backend(transport: TransportName, group: Capabilities) -> BackendChoice:
    """The first line that applies:

    | asked for    | device | hosts of the group     | and                              | backend                 |
    |--------------|--------|------------------------|----------------------------------|-------------------------|
    | gloo         | GPU    | any                    |                                  | `gloo`                  |
    | any          | GPU    | any                    |                                  | `nccl`                  |
    | gloo         | CPU    | any                    |                                  | `gloo`                  |
    | shm          | CPU    | one, else an error     | the core in C, else an error     | `shm`                   |
    | mpi          | CPU    | any                    | mpiexec and mpi4py, else an error| `mpi`                   |
    | any          | CPU    | one, of one rank       |                                  | `gloo`                  |
    | auto         | CPU    | one                    | the core in C was not built      | `gloo`                  |
    | hierarchical | CPU    | one                    | the core in C, else an error     | `shm`                   |
    | auto         | CPU    | one                    |                                  | `shm`                   |
    | auto         | CPU    | several                | mpiexec started them, mpi4py     | `mpi`                   |
    | any          | CPU    | several, one rank each |                                  | `gloo`                  |
    | auto         | CPU    | several                | the core in C was not built      | `gloo`                  |
    | hierarchical | CPU    | several                | the core in C, else an error     | `hierarchical`          |
    | auto         | CPU    | several                |                                  | `hierarchical`          |

    On one host nothing is faster than its memory. Between hosts an MPI that started the ranks knows the network best,
    faster ones than Ethernet too; Gloo speaks TCP, and two levels send the least that any algorithm can between hosts
    (`shoal.comm.two_levels`).

    Sizes of messages are decided inside a backend: `shm` takes one shot up to 128 KB and two above, `hierarchical` cuts
    what is above 2 MB into pieces.

    Raises `EnvironmentFault` where the requested transport is not available, and for two ranks on one GPU over NCCL.
    """
    if group.device == "cuda" and transport == "gloo":
        return BackendChoice("gloo", "gloo: asked for, and tensors of GPUs go through the host")
    if group.device == "cuda":
        if (both := group.on_one_gpu) is not None:
            raise EnvironmentFault(
                f"ranks {both[0]} and {both[1]} of a group have one GPU, which NCCL refuses: start one rank a GPU "
                "(under Slurm as many tasks as GPUs on each node), or, to test a layout, set run.share_gpus = true and "
                'wire.transport = "gloo"'
            )
        return BackendChoice("nccl", "nccl: GPUs")
    if refusal := _refusal(transport, group):
        raise EnvironmentFault(
            f'wire.transport = "{transport}" is not available to these {len(group.hosts)} ranks: {refusal}; or set it '
            'to "auto", which takes what is there'
        )
    if transport in ("gloo", "shm", "mpi"):
        return BackendChoice(transport, f"{transport}: asked for")
    return _by_hosts(group, may_be_mpi=transport == "auto")


def _by_hosts(group: Capabilities, *, may_be_mpi: bool) -> BackendChoice:
    ranks, hosts = len(group.hosts), group.host_count
    if ranks == 1:
        return BackendChoice("gloo", "gloo: one rank alone")
    if hosts == 1 and group.no_core:
        return BackendChoice("gloo", f"gloo: {ranks} ranks on one host, and {group.no_core}")
    if hosts == 1:
        return BackendChoice("shm", f"shared memory: {ranks} ranks on one host")
    if may_be_mpi and group.by_mpi and not group.no_mpi:
        return BackendChoice("mpi", f"mpi: mpiexec started {ranks} ranks on {hosts} hosts")
    if hosts == ranks:
        return BackendChoice("gloo", f"gloo: one rank on each of {hosts} hosts")
    if group.no_core:
        return BackendChoice("gloo", f"gloo: ranks on {hosts} hosts, and {group.no_core}")
    return BackendChoice("hierarchical", f"shared memory inside hosts, Gloo between: {ranks} ranks on {hosts} hosts")


def _refusal(transport: TransportName, group: Capabilities) -> str:
    """Why not, and what to do; empty where it can be."""
    if transport == "mpi":
        return group.no_mpi
    if transport == "shm" and group.host_count > 1:
        return f'they are on {group.host_count} hosts; set it to "hierarchical", which shares memory inside each'
    shares_memory = transport in ("shm", "hierarchical") and group.host_count < len(group.hosts)
    return group.no_core if shares_memory else ""


Algorithm = Literal[
    "backend", "auto", "ring", "recursive-doubling", "halving-doubling", "circulant", "one-shot", "two-shot",
    "double-tree", "hierarchical", "torus",
]  # fmt: skip
"""What computes collectives: the backend, the cheapest table on the measured links, or one all-reduce algorithm."""


class WireConfig(Table, frozen=True):
    """What the ranks talk over, and how long one waits for another."""

    transport: Annotated[
        TransportName,
        says(
            "What CPU ranks talk over: Gloo, shared memory, shared memory inside hosts and Gloo between them "
            "(hierarchical), or MPI. GPUs talk over NCCL, or over Gloo where that is asked for. auto: shared memory "
            "where all ranks of a group are on one host; else MPI if "
            "mpiexec started them; else hierarchical, or Gloo if no two ranks share a host."
        ),
    ] = "auto"
    algorithm: Annotated[
        Algorithm,
        says(
            "How groups over Gloo compute collectives: as Gloo does (backend), by the cheapest algorithm on the links "
            "measured at the start and, under sync.kind = allreduce, whenever they have changed (auto), or all-reduces "
            "by one algorithm. With auto, on three or more ranks, the next run or a resumed one may sum in another "
            "order, so it does not go on to the bit; a replay repeats the choices of groups of at most 16 ranks whose "
            "links are followed (sync.kind = allreduce, gradients.schedule = order, no PipeDream, CPUs)."
        ),
    ] = "backend"
    check_collectives: Annotated[
        bool,
        says(
            "Compare every collective between its ranks before it runs; ranks that call different ones are named, "
            "with the line of code, instead of hanging."
        ),
    ] = False
    report_hang_s: Annotated[
        float,
        says(
            "Seconds in one collective after which all ranks say where they are, and one sentence names who is waited "
            "for and the line of code; 0: never.",
            ge=0,
        ),
    ] = 30.0
    timeout_s: Annotated[float, says("Longest wait for the other ranks in one collective.", gt=0, le=86400)] = 60.0
