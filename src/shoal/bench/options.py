"""Options that several benchmarks have, and the lists that they take."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import typer

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
