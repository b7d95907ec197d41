"""`shoal sweep`."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.output import AsJson
from shoal.errors import UsageError
from shoal.standard_output import answer


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="The sweep file.")],
    directory: Annotated[Path | None, typer.Option(help="Its folder; default: sweeps/NAME.")] = None,
    via: Annotated[
        str | None,
        typer.Option(
            help="A command that starts each trial elsewhere, its words before the trial's: 'srun --nodes=1 --ntasks=1 "
            "--exact --gpus=1'. 'ray': on the Ray cluster of RAY_ADDRESS."
        ),
    ] = None,
    trial: Annotated[
        int | None,
        typer.Option(help="Train this one alone, as a task of a scheduler's array: --trial $SLURM_ARRAY_TASK_ID."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Trains a run file with other keys, many times; started again, it goes on where it was.

    Example: shoal sweep recipes/sweeps/digits.toml
    """
    from shoal.experiments.config import load_sweep
    from shoal.experiments.results import draw, lines, rows
    from shoal.experiments.sweep import Sweep
    from shoal.experiments.trial_command import train_alone

    loaded = load_sweep(file)
    folder = directory or Path("sweeps") / loaded.name
    folder.mkdir(parents=True, exist_ok=True)
    say = partial(print, file=sys.stderr, flush=True)
    running = Sweep(loaded, file.parent / loaded.run, folder, say=say, via=via_words(via))
    if trial is not None:
        raise typer.Exit(train_alone(loaded, trial, running.run_file, folder))
    outcomes = running.run()
    found = rows(outcomes, minimize=loaded.goal == "minimize")
    draw(running, outcomes, folder / "sweep.png")
    steps = sum(row.steps for row in found)
    if as_json:
        answer(msgspec.json.encode({"objective": loaded.objective, "steps": steps, "rows": found}).decode())
    else:
        print("\n".join([*lines(found, objective=loaded.objective), f"{steps:,} steps in all; {folder / 'sweep.png'}"]))
    raise typer.Exit(0 if any(row.state == "finished" for row in found) else 1)


def via_words(via: str | None) -> list[str]:
    """The command before a trial's own. Raises `UsageError` where it cannot be read."""
    if via == "ray":
        return [sys.executable, "-m", "shoal.submit.ray_trial"]
    try:
        return shlex.split(via or "")
    except ValueError as fault:
        raise UsageError(f"--via {via!r} is no command line ({fault}): quote its words as a shell would") from fault
