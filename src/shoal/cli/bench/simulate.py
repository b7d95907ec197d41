"""`shoal bench simulate`: the simulator beside the zero-bubble paper's tables and closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.bench.options import AsJson
from shoal.cli.bench.show import show


def simulate(
    tables: Annotated[Path, typer.Argument(metavar="TABLES", help="Folder of published tables.")],
    as_json: AsJson = False,
) -> None:
    """The simulator beside the zero-bubble paper's tables and closed forms.

    Example: shoal bench simulate tests/planner/published
    """
    from shoal.recipes.benchmarks.simulate import measure

    result = measure(tables)
    show("simulate", result["rows"], result["checks"], as_json)
