"""`shoal sweep` and `shoal tune`: which values of keys are best, by many runs or by a short one."""

from __future__ import annotations

import shlex
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from shoal.cli.arguments import AsJson, Overrides, Verbs, output_folder, picture_file
from shoal.errors import EnvironmentFault, UsageError
from shoal.observe.busy import busy
from shoal.standard_output import answer


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="The sweep file.")],
    directory: Annotated[
        Path | None, typer.Option(help="Its folder; default: sweeps/NAME.", callback=output_folder)
    ] = None,
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
    from shoal.experiments.results import draw, lines, rows
    from shoal.experiments.search import load_sweep
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


tune = typer.Typer(
    cls=Verbs, no_args_is_help=True, rich_markup_mode=None, help="Finds the value of a key by a short run."
)


@tune.callback()
def tune_command() -> None:
    """Finds the value of a key by a short run."""


@tune.command("lr")
def lr(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the file's.")
    ] = None,
    first: Annotated[float, typer.Option("--from", help="The rate of the first step.")] = 1e-6,
    last: Annotated[float, typer.Option("--to", help="The rate of the last step, where training diverges.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Steps of the test.", min=20, max=10_000)] = 100,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE.png", help="Also draw the curve there.", callback=picture_file),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Trains a run file for a few steps while the learning rate rises, and suggests one.

    All ranks of the run file's layout take part. The run lies in a folder that is deleted afterwards.

    Example: shoal tune lr recipes/digits.toml --from 1e-5 --to 1
    """
    if not 0 < first < last <= 1000:
        raise typer.BadParameter(f"{first:g} to {last:g}: give 0 < from < to <= 1000", param_hint="--from, --to")
    from shoal.experiments.lr_range import draw, in_characters, range_test
    from shoal.files import temporary_folder

    with temporary_folder() as folder, busy(f"training {steps} steps at rising rates"):
        found = range_test(run_file, overrides or [], first=first, last=last, steps=steps, directory=folder)
    if picture is not None:
        draw(found, picture)
    if as_json:
        answer(msgspec.json.encode(found).decode())
        return
    diverges = found.diverges
    rises = "stays below its start" if diverges is None else f"is above its start from {diverges:.2g} on"
    print("\n".join(in_characters(found)))
    print(f"the loss falls fastest at {found.steepest:.2g}, is lowest at {found.lowest:.2g}, and {rises}")
    print(f"set optimizer.lr = {found.suggested:g}")
    for key, rate in found.beside.items():
        print(f"with {key} = {rate:.2g}, which rose in proportion")


# `shoal ensemble`.


def ensemble(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file of every member.")],
    overrides: Overrides = None,
    members: Annotated[int, typer.Option(min=2, max=1000, help="How many; their seeds are 0, 1, ...")] = 4,
    parallel: Annotated[int, typer.Option(min=1, help="Members that are trained side by side.")] = 1,
    directory: Annotated[
        Path | None, typer.Option(help="Their folder; default: ensembles/NAME.", callback=output_folder)
    ] = None,
    via: Annotated[
        str | None, typer.Option(help="A command that starts each member elsewhere, as of 'shoal sweep'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Trains a run with several seeds and evaluates all of them together; started again, it goes on where it was.

    Example: shoal ensemble recipes/digits.toml run.processes=1 --members 3
    """
    from shoal.experiments.search import Grid, SweepFile
    from shoal.experiments.sweep import Sweep
    from shoal.runfile.load import load_run

    loaded = load_run(run_file, overrides or ())
    keys: dict[str, Any] = {"run.steps": [loaded.run.steps]} | dict(map(_key, overrides or ()))
    file = SweepFile(
        name=loaded.run.name,
        run=str(run_file),
        objective="loss/train",
        parameters=keys,
        search=Grid(),
        seeds=list(range(members)),
        parallel=parallel,
    )
    folder = directory or Path("ensembles") / loaded.run.name
    folder.mkdir(parents=True, exist_ok=True)
    say = partial(print, file=sys.stderr, flush=True)
    outcomes = Sweep(file, run_file, folder, say=say, via=via_words(via)).run()
    trained = [folder / one.trial.name for one in outcomes if one.state == "finished"]
    if len(trained) < 2:
        raise EnvironmentFault(
            f"{len(trained)} of {members} members finished, and an ensemble needs two: {folder}/trial-*/output.txt "
            "says why; the same command trains the others on"
        )
    # Torch is imported when there is something to evaluate.
    from shoal.experiments.ensemble import evaluate_together

    with busy("evaluating the members together"):
        found = evaluate_together(trained)
    if as_json:
        answer(
            msgspec.json.encode(
                {"directories": [str(path) for path in trained], **msgspec.structs.asdict(found)}
            ).decode()
        )
        return
    rows = [(path.name, values) for path, values in zip(trained, found.members, strict=True)]
    for name, values in [*rows, (f"{len(trained)} together", found.ensemble)]:
        print(f"{name:>12}  " + "  ".join(f"{key} {value:.6g}" for key, value in values.items()))


def _key(override: str) -> tuple[str, list[Any]]:
    key, _, text = override.partition("=")
    try:
        return key.strip(), [tomllib.loads(f"x = {text}")["x"]]
    except tomllib.TOMLDecodeError:
        return key.strip(), [text.strip()]  # a bare word is a string, as for shoal train
