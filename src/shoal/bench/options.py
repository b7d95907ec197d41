"""Options that several benchmarks have, and the lists that they take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, get_args

import typer

from shoal.comm.config import TransportName
from shoal.errors import UsageError

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Processes = Annotated[int, typer.Option(help="Ranks of one thread.", min=2)]

FEWEST_PAIRS = 100


def numbers(text: str, option: str, *, least: int = 1, most: int = 1 << 30, multiple_of: int = 1) -> list[int]:
    """The whole numbers of `2,4`, the value of `option`.

    Raises:
        typer.BadParameter: The list is empty, or an entry is not a number, out of bounds or not a multiple.
    """
    parts = _parts(text)
    found = [int(part) if part.isdecimal() else -1 for part in parts]
    if not found or any(not least <= number <= most or number % multiple_of for number in found):
        kind = "numbers" if multiple_of == 1 else f"multiples of {multiple_of}"
        raise typer.BadParameter(f"'{text}'; give {kind} from {least} to {most} with commas", param_hint=option)
    return found


def names(text: str, option: str, known: Collection[str]) -> list[str]:
    """The names of `ddp,tensor`, the value of `option`; all `known` names for an empty value.

    Raises:
        typer.BadParameter: A name is not known.
    """
    found = _parts(text) or list(known)
    if unknown := [name for name in found if name not in known]:
        raise typer.BadParameter(f"'{unknown[0]}'; give some of {', '.join(known)}", param_hint=option)
    return found


def token_counts(text: str) -> list[int]:
    """Tokens of a rank and step from `256,2048`. Raises `typer.BadParameter` for one that is no multiple of 128."""
    return numbers(text, "--tokens", least=128, most=1 << 20, multiple_of=128)


def world_sizes(text: str, *, least: int = 2) -> list[int]:
    """Numbers of ranks from `2,4`. Raises `typer.BadParameter` for one below `least`."""
    return numbers(text, "--processes", least=least, most=1024)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


# What `shoal bench comm` measures: which collectives, of which sizes, by which backends.


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
