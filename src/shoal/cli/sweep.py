"""`shoal sweep`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="The sweep file.")],
    directory: Annotated[Path | None, typer.Option(help="Its folder; default: sweeps/NAME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Trains a run file with other keys, many times; started again, it goes on where it was.

    Example: shoal sweep recipes/sweeps/digits.toml
    """
    from shoal.experiments.config import load_sweep
    from shoal.experiments.results import draw, lines, rows
    from shoal.experiments.sweep import Sweep

    loaded = load_sweep(file)
    folder = directory or Path("sweeps") / loaded.name
    folder.mkdir(parents=True, exist_ok=True)
    running = Sweep(loaded, file.parent / loaded.run, folder, say=lambda text: print(text, file=sys.stderr, flush=True))
    outcomes = running.run()
    found = rows(outcomes, minimize=loaded.goal == "minimize")
    draw(running, outcomes, folder / "sweep.png")
    steps = sum(row.steps for row in found)
    if as_json:
        print(msgspec.json.encode({"objective": loaded.objective, "steps": steps, "rows": found}).decode())
    else:
        print("\n".join([*lines(found, objective=loaded.objective), f"{steps:,} steps in all; {folder / 'sweep.png'}"]))
    raise typer.Exit(0 if any(row.state == "finished" for row in found) else 1)
