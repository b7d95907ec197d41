"""Options that several benchmarks share."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Processes = Annotated[int, typer.Option(help="Ranks of one thread.", min=2)]

FEWEST_PAIRS = 100


def sizes(text: str) -> list[int]:
    """Numbers of tokens from `256,2048`.

    Raises:
        typer.BadParameter: one is no multiple of 128.
    """
    found = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if not found or any(size <= 0 or size % 128 for size in found):
        raise typer.BadParameter(f"'{text}'; give multiples of 128, such as 256,2048", param_hint="--tokens")
    return found


def worlds(text: str) -> list[int]:
    """Numbers of ranks from `2,4`.

    Raises:
        typer.BadParameter: none from 2 on is given.
    """
    found = [int(part) for part in text.split(",") if part.strip().isdigit() and int(part) > 1]
    if not found:
        raise typer.BadParameter(f"'{text}'; give numbers from 2, such as 2,4", param_hint="--processes")
    return found
