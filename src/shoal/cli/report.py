"""`shoal report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.busy import busy


def report(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, finished or not.")],
) -> None:
    """Writes report.html and loss.png of a run: one page, no network.

    Example: shoal report runs/stdlib-gpt
    """
    from shoal.observe.report import write_report

    with busy(f"writing the report of {directory}"):
        page = write_report(directory)
    print(page)
