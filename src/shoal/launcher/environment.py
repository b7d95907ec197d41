"""Where a process stands among the ranks, read from the variables that launchers set.

    launcher   says so by                          rank                    world
    shoal      SHOAL_LAUNCHER                      RANK                    WORLD_SIZE
    torchrun   RANK, WORLD_SIZE                    RANK                    WORLD_SIZE
    slurm      SLURM_STEP_ID, of several tasks     SLURM_PROCID            SLURM_STEP_NUM_TASKS
    mpi        OMPI_COMM_WORLD_RANK, PMI_RANK      (the same variable)     OMPI_COMM_WORLD_SIZE, PMI_SIZE

The first that applies counts. A Slurm batch script or a step of one task is no rank: there Shoal starts its own.
Everything is a pure function of `environ`; values that contradict each other raise `EnvironmentFault`.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.errors import EnvironmentFault
from shoal.installation import install_command

# Slurm's two compressed notations: host lists, and tasks a node.
#
#     n[01-03,7],m2      n01 n02 n03 n7 m2       zeros are kept; a name may have several brackets: r[1-2]n[1-2]
#     2(x3),1            2 2 2 1
#
# Slurm's own expander is a program (`scontrol show hostnames`), which containers often lack; hence these few lines.


MOST_ENTRIES = 1 << 16
_NAME = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_REPEAT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts(nodelist: str) -> list[str]:
    """The host names of a Slurm host list, in its order. Raises `EnvironmentFault` where it cannot be read."""
    names = _NAME.findall(nodelist)
    if not names or ",".join(names) != nodelist:
        raise EnvironmentFault(_unreadable("host list", nodelist, "names like n[01-03,7],m2"))
    return [host for name in names for host in _expand(name, nodelist)]


def tasks_per_node(counts: str) -> list[int]:
    """The number of tasks on each node, from `SLURM_TASKS_PER_NODE`. Raises `EnvironmentFault`."""
    tasks: list[int] = []
    for part in counts.split(","):
        found = _REPEAT.fullmatch(part)
        times = int(found[2] or 1) if found else 0
        if found is None or len(tasks) + times > MOST_ENTRIES:
            raise EnvironmentFault(_unreadable("task count", counts, "counts like 2(x3),1"))
        tasks += [int(found[1])] * times
    return tasks


def _expand(name: str, nodelist: str) -> list[str]:
    pieces = [[text] if text else _numbers(bracket, nodelist) for bracket, text in _PIECE.findall(name)]
    total = 1
    for piece in pieces:
        total *= len(piece)
    if total > MOST_ENTRIES:
        raise EnvironmentFault(_unreadable("host list", nodelist, f"at most {MOST_ENTRIES} hosts"))
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def _numbers(bracket: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket.split(","):
        found = _SPAN.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or last < first or last - first + len(numbers) >= MOST_ENTRIES:
            raise EnvironmentFault(_unreadable("host list", nodelist, "brackets like [01-03,7]"))
        numbers += [f"{number:0{len(found[1])}d}" for number in range(first, last + 1)]
    return numbers


def _unreadable(what: str, text: str, rule: str) -> str:
    return (
        f"Slurm's {what} {text[:200]!r} cannot be read: it should hold {rule}; "
        "set MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE to do without it"
    )


Environ = Mapping[str, str]
Launcher = Literal["shoal", "torchrun", "slurm", "mpi", "none"]

LOOPBACK = "127.0.0.1"
# The descriptor of a socket that already listens on MASTER_PORT, for rank 0 of Shoal's own launcher.
STORE_FD = "SHOAL_STORE_FD"
# Slurm gives its own steps (batch, extern, interactive) numbers from the very top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Derived ports lie below the range that kernels hand out by themselves (32768 on Linux).
FIRST_PORT, PORTS = 15_000, 16_000


@dataclass(frozen=True)
class Place:
    """One rank's place: `0 <= rank < world_size`, and the same within its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    launcher: Launcher

    @property
    def one_host(self) -> bool:
        """Whether all ranks share this host."""
        return self.local_world_size == self.world_size


ALONE = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, launcher="none")
"""The place of a process that no launcher started and that trains by itself."""


def place_from(environ: Environ) -> Place | None:
    """This process's place, or None where no launcher started it. Raises `EnvironmentFault` on a contradiction."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if _in_slurm_step(environ):
        return _slurm(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        prefix = "OMPI_COMM_WORLD_"
        return _mpi(environ, prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE")
    if "PMI_RANK" in environ:
        return _mpi(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return None


def master_from(environ: Environ) -> tuple[str, int]:
    """Address and port where rank 0 hosts the store. Raises `EnvironmentFault` where neither is given nor derivable."""
    address = environ.get("MASTER_ADDR") or _derived_address(environ)
    if environ.get("MASTER_PORT"):
        port = whole_number(environ, "MASTER_PORT")
        if not 0 < port < 1 << 16:
            raise EnvironmentFault(f"MASTER_PORT is {port}: a port lies between 1 and 65535; set one that is free")
    else:
        port = derived_port(environ)
    return address, port


def _torchrun(environ: Environ) -> Place:
    rank, world_size = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    # Kubernetes' operators set these two alone: one process a pod.
    local_rank, local_size = whole_number(environ, "LOCAL_RANK", 0), whole_number(environ, "LOCAL_WORLD_SIZE", 1)
    _check_below("RANK", rank, "WORLD_SIZE", world_size)
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    node_rank = whole_number(environ, "GROUP_RANK", rank // local_size)
    launcher = "shoal" if environ.get("SHOAL_LAUNCHER") else "torchrun"
    return _place(rank, world_size, local_rank, local_size, node_rank=node_rank, launcher=launcher)


def _in_slurm_step(environ: Environ) -> bool:
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    return (
        whole_number(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP and whole_number(environ, _slurm_size(environ)) > 1
    )


def _slurm(environ: Environ) -> Place:
    size_name = _slurm_size(environ)
    rank, world_size = whole_number(environ, "SLURM_PROCID"), whole_number(environ, size_name)
    local_rank, node = whole_number(environ, "SLURM_LOCALID"), whole_number(environ, "SLURM_NODEID")
    _check_below("SLURM_PROCID", rank, size_name, world_size)
    local_size = _slurm_local_size(environ, node)
    _check_below("SLURM_LOCALID", local_rank, "the node's task count", local_size)
    return _place(rank, world_size, local_rank, local_size, node_rank=node, launcher="slurm")


def _slurm_size(environ: Environ) -> str:
    # A step may be smaller than its job: the step's own count goes first.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _slurm_local_size(environ: Environ, node: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            counts = tasks_per_node(environ[name])
            _check_below("SLURM_NODEID", node, f"the number of nodes in {name}", len(counts))
            return counts[node]
    return whole_number(environ, "SLURM_NTASKS_PER_NODE")


def _mpi(environ: Environ, rank_name: str, size_name: str, local_rank_name: str, local_size_name: str) -> Place:
    rank, world_size = whole_number(environ, rank_name), whole_number(environ, size_name)
    local_rank, local_size = whole_number(environ, local_rank_name), whole_number(environ, local_size_name)
    _check_below(rank_name, rank, size_name, world_size)
    _check_below(local_rank_name, local_rank, local_size_name, local_size)
    return _place(rank, world_size, local_rank, local_size, node_rank=rank // local_size, launcher="mpi")


def _place(
    rank: int, world_size: int, local_rank: int, local_size: int, *, node_rank: int, launcher: Launcher
) -> Place:
    if local_size > world_size:
        raise EnvironmentFault(
            f"{launcher} says {local_size} ranks on this host but {world_size} in all: "
            "a host holds at most all of them; unset the variables of an outer job, or set them for this one"
        )
    return Place(rank, world_size, local_rank, local_size, node_rank, launcher)


def whole_number(environ: Environ, name: str, default: int | None = None) -> int:
    """The variable `name` as a whole number. Raises `EnvironmentFault` where it is none, or missing without default."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    # isascii: isdigit alone also accepts the digits of other scripts, and superscripts that int() refuses.
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 10):
        found = "missing" if text is None else repr(text[:40])
        raise EnvironmentFault(
            f"the environment variable {name} is {found}: it should be a whole number; "
            "set it, or unset the launcher's variables to start ranks here"
        )
    return int(text)


def _check_below(name: str, value: int, bound_name: str, bound: int) -> None:
    if value >= bound:
        raise EnvironmentFault(
            f"{name} is {value} but {bound_name} is {bound}: ranks count from 0 to one less than the size; "
            "unset the variables of an outer job, or set them for this one"
        )


def _derived_address(environ: Environ) -> str:
    place = place_from(environ)
    if place is not None and place.one_host:
        return LOOPBACK
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            return hosts(environ[name])[0]
    raise EnvironmentFault("MASTER_ADDR is missing: ranks on several hosts need rank 0's address; set it on every rank")


def derived_port(environ: Environ) -> int:
    """A port that all ranks of a job find alike. Raises `EnvironmentFault` where nothing identifies the job."""
    if environ.get("SLURM_JOB_ID"):
        number = whole_number(environ, "SLURM_JOB_ID") + whole_number(environ, "SLURM_STEP_ID", 0)
    elif environ.get("PMIX_NAMESPACE"):
        number = zlib.crc32(environ["PMIX_NAMESPACE"].encode())
    else:
        raise EnvironmentFault(
            "MASTER_PORT is missing: the ranks meet at one port of rank 0; set it on every rank"
            + (f", or {install_command('mpi')}: then they meet over MPI" if "PMI_RANK" in environ else "")
        )
    return FIRST_PORT + number % PORTS


# Which variables of the environment hold secrets, by their names. What records, shows or sends variables asks here.
#
# A name is enough to be left out. A value is looked at for one thing alone: an address that carries a password.


_NAMES = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE|COOKIE|WEBHOOK|KEYS?(?![A-Z])|_(PASS|PWD|AUTH|DSN)$",
    re.IGNORECASE,
)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^\s/@:]*:[^\s/@]+@")


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable of this name, or with this value, may hold a secret."""
    return _NAMES.search(name) is not None or _PASSWORD_IN_ADDRESS.search(value) is not None
