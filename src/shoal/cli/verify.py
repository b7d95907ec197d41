"""`shoal verify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.output import AsJson
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.launch.environment import Place
    from shoal.runfile.run_file import RunFile


def verify(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.toml|SCRIPT.py", help="The run file, or a script that calls shoal.start.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value]...", help="Keys that replace the file's or the script's; then the script's arguments."
        ),
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
    as_json: AsJson = False,
) -> None:
    """Proves a layout and a strategy against one process: loss, norm, every gradient, the weights after each step.

    A script's own loop is run twice: in plain PyTorch in one process, and by its ranks.

    Example: shoal verify recipes/stdlib-gpt.toml layout.tensor=2 layout.shard=2

    Example: shoal verify mine.py run.processes=4 layout.shard=2 memory.zero=3
    """
    if run_file.suffix == ".py":
        raise typer.Exit(_verify_script(run_file, overrides or (), steps=steps, exact=exact, as_json=as_json))
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
        answer(json.dumps(verdict.to_json()) if as_json else "\n".join(verdict.lines()))
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


def _verify_script(script: Path, arguments: Sequence[str], *, steps: int | None, exact: bool, as_json: bool) -> int:
    from shoal.errors import VerificationFailed
    from shoal.observe.progress_bar import open_progress_bar
    from shoal.verification.scripts import STEPS, verify_script

    with open_progress_bar(sys.stderr) as bar:
        found = verify_script(script, arguments, steps=steps or STEPS, exact=exact, bar=bar)
    if isinstance(found, int):
        return found
    answer(json.dumps(found.to_json()) if as_json else "\n".join(found.lines()))
    if not found.holds:
        raise VerificationFailed(found.sentence())
    return 0
