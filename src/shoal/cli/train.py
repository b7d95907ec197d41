"""`shoal train`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.arguments import AsJson, ScriptOverrides, coordination, lab_at
from shoal.observe.busy import importing_torch
from shoal.observe.figures import help_lines
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.launcher.environment import Place
    from shoal.observe.config import ObserveConfig
    from shoal.runfile.run_file import RunFile


HELP = f"""Trains a run file, or a script that calls shoal.train or shoal.start. A run that was cut off is resumed from
its newest checkpoint.

A run that is finished stays as it is: with the same keys there is nothing to train, with more run.steps it goes on
from its last step, and with any other key that changes the result a new run is trained in runs/NAME-2.

Recipes and their models are in Shoal's repository, and are started from its root.

Example: shoal train recipes/digits.toml run.processes=2 run.steps=200

Example: shoal train mine.py run.processes=2 -- --epochs 3

What the live line and the last line say:

\b
{help_lines()}
"""


def train(
    run_file: Annotated[
        str | None, typer.Argument(metavar="RUN.toml|SCRIPT.py", help="The run file, or a script; none with --replay.")
    ] = None,
    overrides: ScriptOverrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train a new run, runs/NAME-2, whatever there is of this one.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep to the run that is there, even if it is finished and keys changed.")
    ] = False,
    ranks: Annotated[int | None, typer.Option("-n", min=1, help="Ranks, as run.processes=N says it.")] = None,
    lab: Annotated[
        Path | None, typer.Option("--lab", metavar="LAB.toml", help="Train on the hosts and links of a lab file.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", metavar="RUN_DIR", help="Repeat a run to the bit, in RUN_DIR-replay.")
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator", metavar="HOST:PORT", help="Of an elastic run on several hosts; start this on each of them."
        ),
    ] = None,
    token: Annotated[Path | None, typer.Option("--token", metavar="FILE", help="The job's token.")] = None,
    authorities: Annotated[
        Path | None, typer.Option("--authorities", metavar="PEM", help="Who may vouch for the coordinator (TLS).")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=1, help="Replicas on this host, with --coordinator; default: one.")
    ] = None,
) -> None:
    """Trains a run file or a script, as `HELP` says."""
    from shoal.assembly.finished_run import chosen_run, intent_of
    from shoal.assembly.start import run
    from shoal.assembly.user_code import require_modules
    from shoal.cli.arguments import become_script
    from shoal.observe.facts import recorded_run_file
    from shoal.planning.arrange import PLANNER
    from shoal.runfile.load import load_run
    from shoal.runfile.run_file import run_directory

    flags = [flag for flag, given in (("--fresh", fresh), ("--resume", resume)) if given]
    intent, _ = intent_of(flags)
    environ = os.environ | coordination(coordinator, token, authorities, replicas)
    overrides = [*(overrides or ()), *([] if ranks is None else [f"run.processes={ranks}"])]
    if run_file is not None and run_file.endswith(".py"):
        if lab is not None or replay is not None:
            raise typer.BadParameter("takes a run file, and not a script", param_hint="--lab, --replay")
        become_script(Path(run_file), overrides, environ, flags=flags)
    keys, command = overrides, [sys.executable, "-m", "shoal", "train"]
    if replay is None:
        if run_file is None:
            raise typer.BadParameter("give a run file, or --replay RUN_DIR", param_hint="RUN.toml")
        file, command = Path(run_file), [*command, run_file, *keys]
        named = load_run(file, keys)
        require_modules(named, file)
        loaded = chosen_run(named, intent, environ=environ)
    else:
        if run_file is not None or overrides or intent != "auto":
            raise typer.BadParameter("a replay is the recorded run, and takes no keys", param_hint="--replay")
        file, command = recorded_run_file(replay), [*command, "--replay", str(replay)]
        recorded = load_run(file, [f"run.directory={json.dumps(f'{replay}-replay')}"])
        from shoal.assembly.run_record import replayed  # imports torch

        loaded = replayed(recorded)
    directory, hosts = run_directory(loaded), lab_at(lab)
    be_rank = partial(_rank, replay=replay)
    _check_one_rank(loaded)
    with _page(loaded.observe, directory):
        code = run(
            loaded, command, be_rank, directory=directory, file=str(file), lab=hosts, planner=PLANNER, environ=environ
        )
    raise typer.Exit(code)


def _check_one_rank(run_file: RunFile) -> None:
    """Before any rank starts: the run with which speed-up is told. Raises `UsageError`."""
    import tomllib

    from shoal.config.load import dumps
    from shoal.launcher.environment import place_from
    from shoal.observe.goodput import one_rank_rate

    if run_file.observe.one_rank is not None and place_from(os.environ) is None:
        one_rank_rate(Path(run_file.observe.one_rank), tomllib.loads(dumps(run_file))["model"])


def _page(observe: ObserveConfig, directory: Path) -> AbstractContextManager[object]:
    """The live page, from the process that starts the ranks; under another launcher nobody serves it."""
    from shoal.launcher.environment import place_from
    from shoal.launcher.supervision import say

    place = place_from(os.environ)
    if not observe.page or (place is not None and (place.launcher == "shoal" or place.rank != 0)):
        return nullcontext()
    if place is not None:
        say(f"observe.page is for ranks that shoal train starts itself: shoal watch {directory} serves the page")
        return nullcontext()
    from shoal.page.server import page_beside

    return page_beside(directory, port=observe.page_port, say=say)


def _rank(run_file: RunFile, place: Place, *, replay: Path | None) -> None:
    with importing_torch():
        from shoal.assembly.objects import UserObjects
        from shoal.planning.prediction import FORECAST
        from shoal.training import train_rank

    train_rank(run_file, place, UserObjects(), forecast=FORECAST, replay=replay)


# `shoal evaluate`.


def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run directory, or a checkpoint in it.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the run's.")
    ] = None,
    flops: Annotated[
        bool, typer.Option("--flops", help="Say the operations of a forward of one sample, too; one process, eager.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluates a checkpoint's weights on the held-out data, without training.

    Example: shoal evaluate runs/digits run.processes=1
    """
    from shoal.assembly.start import run
    from shoal.assembly.user_code import require_nameable
    from shoal.errors import UsageError
    from shoal.files import meant
    from shoal.launcher.supervision import NOTHING_KEPT
    from shoal.planning.arrange import PLANNER
    from shoal.runfile.load import load_run

    folder = source.parent.parent if (source / "manifest.json").exists() else source
    if not (folder / "run.toml").exists():
        raise UsageError(
            f"{source} holds no run{meant(source)}: give a run directory, such as runs/NAME, or a checkpoint in one"
        )
    alone = ["run.processes=1", "run.compile=false"] if flops else []
    loaded = load_run(folder / "run.toml", [*(overrides or ()), *alone])
    require_nameable({"model": loaded.model, "data": loaded.data, "loss": loaded.loss}, folder)

    def rank(run_file: RunFile, place: Place) -> None:
        with importing_torch():
            from shoal.assembly.conclusion import evaluate_rank
            from shoal.assembly.objects import UserObjects
        from shoal.observe.terminal import ProgressBar, open_progress_bar

        with open_progress_bar(sys.stderr) if place.rank == 0 else ProgressBar() as bar:
            values = evaluate_rank(run_file, place, UserObjects(), source=source, bar=bar, counts_flops=flops)
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
        *(["--flops"] if flops else []),
        *(["--json"] if as_json else []),
    ]
    raise typer.Exit(
        run(
            loaded,
            command,
            rank,
            directory=folder,
            file=str(folder / "run.toml"),
            patience=NOTHING_KEPT,
            planner=PLANNER,
        )
    )
