"""`shoal evaluate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import AsJson
from shoal.standard_output import answer


def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run directory, or a checkpoint in it.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the run's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluates a checkpoint's weights on the held-out data, without training.

    Example: shoal evaluate runs/digits run.processes=1
    """
    from shoal.assembly.start import run
    from shoal.errors import UsageError
    from shoal.launch.environment import Place
    from shoal.planning.arrange import PLANNER
    from shoal.runfile.load import load_run
    from shoal.runfile.run_file import RunFile

    folder = source.parent.parent if (source / "manifest.json").exists() else source
    if not (folder / "run.toml").exists():
        raise UsageError(f"{source} holds no run: give a run directory, such as runs/NAME, or a checkpoint in one")
    loaded = load_run(folder / "run.toml", overrides or ())

    def rank(run_file: RunFile, place: Place) -> None:
        from shoal.assembly.evaluation import evaluate_rank
        from shoal.assembly.objects import UserObjects
        from shoal.observe.progress_bar import ProgressBar, open_progress_bar

        with open_progress_bar(sys.stderr) if place.rank == 0 else ProgressBar() as bar:
            values = evaluate_rank(run_file, place, UserObjects(), source=source, bar=bar)
        if place.rank == 0:
            answer(
                json.dumps(values) if as_json else "  ".join(f"{name} {value:.6g}" for name, value in values.items())
            )

    command = [
        sys.executable,
        "-m",
        "shoal",
        "evaluate",
        str(source),
        *(overrides or ()),
        *(["--json"] if as_json else []),
    ]
    raise typer.Exit(
        run(loaded, command, rank, directory=folder, file=str(folder / "run.toml"), writes=False, planner=PLANNER)
    )
