"""`shoal bench plan`: predicted step times beside published ones, worst rows first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.bench.options import AsJson
from shoal.cli.bench.show import show
from shoal.cli.output import output_file


def plan(
    tables: Annotated[Path, typer.Argument(metavar="TABLES", help="Folder of published tables.")],
    markdown: Annotated[Path | None, typer.Option(help="Write the page here.", callback=output_file)] = None,
    as_json: AsJson = False,
) -> None:
    """Predicted step times beside published ones, worst rows first.

    Example: shoal bench plan tests/planner/published
    """
    from shoal.recipes.benchmarks.plan import measure

    result = measure(tables)
    if markdown is not None:
        markdown.write_text(result["markdown"], encoding="utf-8")
    if as_json:
        show("plan", result["rows"], result["checks"], as_json)
    else:
        print(result["markdown"])
