"""`shoal bench feed`: how long a step waits for its data, also when reading is slowed to just under the need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, Processes
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def feed(
    run_files: Annotated[list[Path], typer.Argument(metavar="RUN.toml...", help="Run files with data of Shoal's own.")],
    steps: Annotated[int, typer.Option(help="Steps as they are, and as many slowed.", min=10)] = 100,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """How long a step waits for its data, also when reading is slowed to just under the need.

    Example: shoal bench feed recipes/digits.toml
    """
    from shoal.recipes.benchmarks import machine

    if machine.is_rank():
        as_rank(lambda place: _feed(place, run_files[0], steps))
        return
    commands = [["bench", "feed", str(file.resolve()), "--steps", str(steps)] for file in run_files]
    results = [machine.on_ranks(arguments, processes=processes) for arguments in commands]
    show("feed", [r["row"] for r in results], [c for r in results for c in r["checks"]], as_json)


def _feed(place: Place, file: Path, steps: int) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.feed import measure
    from shoal.runfile.load import load_run

    return measure(load_run(file), place, steps=steps)
