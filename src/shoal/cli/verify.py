"""`shoal verify`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.launch.environment import Place
    from shoal.runfile.run_file import RunFile


def verify(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the file's.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Optimizer steps to compare. Default: 5; where replicas differ, two periods of their agreement.",
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="In float64, to 1e-12 instead of 1e-5.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Proves a layout and a strategy against one process: loss, norm, every gradient, the weights after each step.

    Example: shoal verify recipes/stdlib-gpt.toml layout.tensor=2 layout.shard=2
    """
    from shoal.assembly.start import run
    from shoal.planning.arrange import PLANNER
    from shoal.runfile.load import load_run
    from shoal.runfile.run_file import run_directory
    from shoal.verification.refusals import require_provable

    loaded = load_run(run_file, overrides or ())
    require_provable(loaded)

    def rank(run_file: RunFile, place: Place) -> None:
        from shoal.assembly.objects import UserObjects
        from shoal.errors import VerificationFailed
        from shoal.observe.progress_bar import ProgressBar, open_progress_bar
        from shoal.verification.verify import verify_rank

        with open_progress_bar(sys.stderr) if place.rank == 0 else ProgressBar() as bar:
            verdict = verify_rank(run_file, place, UserObjects(), steps=steps, exact=exact, bar=bar)
        if verdict is None:
            return
        print(json.dumps(verdict.to_json()) if as_json else "\n".join(verdict.lines()), flush=True)
        if not verdict.holds:
            raise VerificationFailed(verdict.sentence())

    flags = [
        *([] if steps is None else ["--steps", str(steps)]),
        *(["--exact"] if exact else []),
        *(["--json"] if as_json else []),
    ]
    command = [sys.executable, "-m", "shoal", "verify", str(run_file), *(overrides or ()), *flags]
    raise typer.Exit(
        run(loaded, command, rank, directory=run_directory(loaded), file=str(run_file), writes=False, planner=PLANNER)
    )
