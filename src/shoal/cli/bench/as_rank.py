"""A benchmark's own processes: each measures as one rank, the first hands in the result."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def as_rank(measure: Callable[[Place], dict[str, Any] | None]) -> None:
    """Runs `measure` at this process's place; what it gives, on the first rank, is the result."""
    from shoal.launch.environment import place_from
    from shoal.recipes.benchmarks import machine
    from shoal.recipes.start import as_rank

    place = place_from(os.environ)
    if place is None:
        raise typer.BadParameter("a rank of a benchmark was started without its place")

    def measured() -> None:
        result = measure(place)
        if result is not None:
            machine.hand_in(result)

    as_rank(place, measured, os.environ)
