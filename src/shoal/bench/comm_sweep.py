"""What `shoal bench comm` measures: which collectives, of which sizes, by which backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from shoal.comm.backends import TransportName
from shoal.errors import UsageError

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
)  # fmt: skip
PEER: TransportName = "gloo"
BACKENDS = tuple(name for name in get_args(TransportName) if name != "auto")
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
        """Raises `UsageError` for an unknown name or impossible sizes."""
        for found, known, option in (
            (self.operations, OPERATIONS, "--operations"),
            (self.backends, BACKENDS, "--backends"),
            ((self.dtype,), DTYPES, "--dtype"),
        ):
            if unknown := [name for name in found if name not in known]:
                raise UsageError(f"{option} {unknown[0]}: it is not known; give one of {', '.join(known)}")
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
        """The same sweep as command-line options."""
        return [
            "--operations", ",".join(self.operations), "--backends", ",".join(self.backends),
            "--first", str(self.first_bytes), "--last", str(self.last_bytes), "--factor", str(self.factor),
            "--turns", str(self.turns), "--dtype", self.dtype,
        ]  # fmt: skip
