"""`shoal train`."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
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
    with _page(loaded, directory):
        code = run(loaded, command, _rank, directory=directory, file=str(run_file), lab=hosts, planner=PLANNER)
    raise typer.Exit(code)


def _page(run_file: RunFile, directory: Path) -> AbstractContextManager[object]:
    """The live page, from the process that starts the ranks; under another launcher nobody serves it."""
    from shoal.launch.environment import place_from
    from shoal.launch.supervision import say

    place = place_from(os.environ)
    if not run_file.observe.page or (place is not None and (place.launcher == "shoal" or place.rank != 0)):
        return nullcontext()
    if place is not None:
        say(f"observe.page is for ranks that shoal train starts itself: shoal watch {directory} serves the page")
        return nullcontext()
    from shoal.page.beside import page_beside

    return page_beside(directory, port=run_file.observe.page_port, say=say)


def _lab(path: Path | None) -> Lab | None:
    from shoal.launch.lab.lab_file import load_lab

    return None if path is None else load_lab(path)


def _rank(run_file: RunFile, place: Place) -> None:
    from shoal.planning.prediction import FORECAST
    from shoal.recipes.objects import UserObjects
    from shoal.recipes.training import train_rank

    train_rank(run_file, place, UserObjects(), forecast=FORECAST)
