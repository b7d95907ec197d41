"""What `shoal bench comm` is asked to measure. Imports no torch, so that a wrong option is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from shoal.comm.backends import Transport
from shoal.errors import UsageError

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
)  # fmt: skip
PEER = "gloo"
BACKENDS = tuple(name for name in get_args(Transport) if name != "auto")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64")
LARGEST_BYTES = 1 << 32


@dataclass(frozen=True)
class Sweep:
    """Operations, backends, and sizes `first_bytes`, times `factor`, ... up to `last_bytes`; `turns` of each."""

    operations: tuple[str, ...]
    backends: tuple[str, ...]
    first_bytes: int
    last_bytes: int
    factor: int
    turns: int
    dtype: str

    def __post_init__(self) -> None:
        """Raises `UsageError` for what there is not."""
        for given, known, what in (
            (self.operations, OPERATIONS, "--operations"),
            (self.backends, BACKENDS, "--backends"),
            ((self.dtype,), DTYPES, "--dtype"),
        ):
            if unknown := [name for name in given if name not in known]:
                raise UsageError(f"{what} {unknown[0]}: there is no such thing to measure; give {', '.join(known)}")
        if not 1 <= self.first_bytes <= self.last_bytes <= LARGEST_BYTES:
            raise UsageError(
                f"--first {self.first_bytes} --last {self.last_bytes}: give 1 <= first <= last <= {LARGEST_BYTES} bytes"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """In bytes, ascending."""
        sizes, size = [], self.first_bytes
        while size <= self.last_bytes:
            sizes.append(size)
            size *= self.factor
        return tuple(sizes)

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        return [
            "--operations", ",".join(self.operations), "--backends", ",".join(self.backends),
            "--first", str(self.first_bytes), "--last", str(self.last_bytes), "--factor", str(self.factor),
            "--turns", str(self.turns), "--dtype", self.dtype,
        ]  # fmt: skip


def default_backends(host_of: Sequence[int]) -> tuple[str, ...]:
    """What is measured beside Gloo where nothing else is asked for, by the hosts of the ranks."""
    hosts = len(set(host_of))
    if hosts == 1:
        return ("shm",)
    return ("hierarchical",) if hosts < len(host_of) else (PEER,)


def check_hosts(backends: Sequence[str], host_of: Sequence[int], *, lab: bool) -> None:
    """Raises `UsageError` for a backend that ranks on these hosts, in a `lab` or not, would not get."""
    ranks, hosts = len(host_of), len(set(host_of))
    where = f"{ranks} ranks on {hosts} {'host' if hosts == 1 else 'hosts'}"
    if "shm" in backends and hosts > 1:
        raise UsageError(f"--backends shm: these are {where}, and memory is shared on one; give hierarchical")
    if "hierarchical" in backends and not 1 < hosts < ranks:
        raise UsageError(
            f"--backends hierarchical: these are {where}, and two levels are several hosts, some with several ranks; "
            "give --lab with a file of such hosts (hosts = 2, ranks_per_host = 2)"
        )
    if "mpi" in backends and lab:
        raise UsageError("--backends mpi: mpiexec starts no ranks in a lab; leave out one of the two")
