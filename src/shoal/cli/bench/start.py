"""`shoal bench start`: seconds from a command to its first step, beside a bare script under torchrun."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.bench.options import AsJson
from shoal.cli.bench.show import show


def start(
    repeats: Annotated[int, typer.Option(help="Starts of each command.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Seconds from a command to its first step, beside a bare script under torchrun.

    Example: shoal bench start --repeats 3
    """
    from shoal.recipes.benchmarks.start import measure

    result = measure(repeats)
    show("start", result["rows"], result["checks"], as_json)
