"""`shoal train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.launch.environment import Place
    from shoal.launch.lab.lab_file import Lab
    from shoal.runfile.run_file import RunFile


def train(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the file's.")
    ] = None,
    lab: Annotated[
        Path | None, typer.Option("--lab", metavar="LAB.toml", help="Train on the hosts and links of a lab file.")
    ] = None,
) -> None:
    """Trains a run file; goes on from the newest checkpoint of its run directory.

    Example: shoal train recipes/digits.toml run.processes=2 run.steps=200
    """
    from shoal.planning.arrange import PLANNER
    from shoal.recipes.start import run
    from shoal.runfile.load import load_run
    from shoal.runfile.run_file import run_directory

    loaded = load_run(run_file, overrides or ())
    command = [sys.executable, "-m", "shoal", "train", str(run_file), *(overrides or ())]
    directory, hosts = run_directory(loaded), _lab(lab)
    code = run(loaded, command, _rank, directory=directory, file=str(run_file), lab=hosts, planner=PLANNER)
    raise typer.Exit(code)


def _lab(path: Path | None) -> Lab | None:
    from shoal.launch.lab.lab_file import load_lab

    return None if path is None else load_lab(path)


def _rank(run_file: RunFile, place: Place) -> None:
    from shoal.planning.prediction import FORECAST
    from shoal.recipes.objects import UserObjects
    from shoal.recipes.training import train_rank

    train_rank(run_file, place, UserObjects(), forecast=FORECAST)
