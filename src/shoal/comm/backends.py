"""Which backend a group of ranks speaks over, by written criteria.

The facts are the same on all ranks of a group, so all come to the same choice; each has a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.errors import EnvironmentFault

Transport = Literal["auto", "gloo", "shm", "hierarchical", "mpi"]
"""What a user may ask for, between ranks without GPUs."""

Backend = Literal["nccl", "shm", "hierarchical", "mpi", "gloo"]


@dataclass(frozen=True)
class Facts:
    """What the ranks of one group found out about themselves.

    `hosts` are the identities of their hosts in rank order; `no_core` and `no_mpi` why a rank has no shared-memory core
    or no MPI, empty where all have; `by_mpi`: mpiexec started them.
    """

    device: Literal["cpu", "cuda"]
    hosts: tuple[str, ...]
    no_core: str = ""
    no_mpi: str = ""
    by_mpi: bool = False

    @property
    def host_count(self) -> int:
        """How many hosts there are."""
        return len(set(self.hosts))


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is that one, for people."""

    backend: Backend
    why: str


def choose_backend(asked: Transport, facts: Facts) -> Choice:
    """The first line that applies:

    | asked for    | device | hosts of the group     | and                              | backend                 |
    |--------------|--------|------------------------|----------------------------------|-------------------------|
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
    (`shoal.comm.hierarchical.division`).

    Sizes of messages are decided inside a backend: `shm` takes one shot up to 128 KB and two above, `hierarchical` cuts
    what is above 2 MB into pieces.

    Raises `EnvironmentFault` where the requested transport is not available.
    """
    if facts.device == "cuda":
        return Choice("nccl", "nccl: GPUs")
    if refusal := _refusal(asked, facts):
        raise EnvironmentFault(
            f'wire.transport = "{asked}" is not available to these {len(facts.hosts)} ranks: {refusal}; or set it to '
            '"auto", which takes what is there'
        )
    if asked in ("gloo", "shm", "mpi"):
        return Choice(asked, f"{asked}: asked for")
    return _by_hosts(facts, may_be_mpi=asked == "auto")


def _by_hosts(facts: Facts, *, may_be_mpi: bool) -> Choice:
    ranks, hosts = len(facts.hosts), facts.host_count
    if ranks == 1:
        return Choice("gloo", "gloo: one rank alone")
    if hosts == 1 and facts.no_core:
        return Choice("gloo", f"gloo: {ranks} ranks on one host, and {facts.no_core}")
    if hosts == 1:
        return Choice("shm", f"shared memory: {ranks} ranks on one host")
    if may_be_mpi and facts.by_mpi and not facts.no_mpi:
        return Choice("mpi", f"mpi: mpiexec started {ranks} ranks on {hosts} hosts")
    if hosts == ranks:
        return Choice("gloo", f"gloo: one rank on each of {hosts} hosts")
    if facts.no_core:
        return Choice("gloo", f"gloo: ranks on {hosts} hosts, and {facts.no_core}")
    return Choice("hierarchical", f"shared memory inside hosts, Gloo between: {ranks} ranks on {hosts} hosts")


def _refusal(asked: Transport, facts: Facts) -> str:
    """Why not, and what to do; empty where it can be."""
    if asked == "mpi":
        return facts.no_mpi
    if asked == "shm" and facts.host_count > 1:
        return f'they are on {facts.host_count} hosts; set it to "hierarchical", which shares memory inside each'
    shares_memory = asked in ("shm", "hierarchical") and facts.host_count < len(facts.hosts)
    return facts.no_core if shares_memory else ""


def facts_of(answers: Sequence[str], *, device: Literal["cpu", "cuda"]) -> Facts:
    """From what each rank wrote (`written`), in rank order. A reason of one rank is one for all."""
    rows = [answer.split("\n") for answer in answers]
    cores = {row[1] for row in rows if not row[2]}
    no_core = next((row[2] for row in rows if row[2]), "")
    if not no_core and len(cores) > 1:
        no_core = "the ranks have different versions of the shared-memory core"
    return Facts(
        device=device,
        hosts=tuple(row[0] for row in rows),
        no_core=no_core,
        no_mpi=next((row[3] for row in rows if row[3]), ""),
        by_mpi=all(row[4] == "mpiexec" for row in rows),
    )


def written(host: str, *, core: str = "", no_core: str = "", no_mpi: str = "", by_mpi: bool = False) -> str:
    """One rank's facts as the text that it shows the others. `core` tells builds of the core apart."""
    return "\n".join(" ".join(text.split()) for text in (host, core, no_core, no_mpi, "mpiexec" if by_mpi else ""))
