"""`shoal VERB`: parse, call, print. Errors that Shoal raises on purpose become a sentence and an exit code here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import shoal
from shoal.cli import (
    bench,
    checkpoint,
    coordinator,
    doctor,
    federate,
    launch,
    plan,
    profile,
    runs,
    simulate,
    submit,
    sweep,
    train,
    verify,
    watch,
)
from shoal.cli.arguments import Verbs
from shoal.errors import ShoalError
from shoal.files import leave_without_collection, refused_file
from shoal.standard_output import escape_controls

app = typer.Typer(
    name="shoal",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {shoal.__version__}")
        raise typer.Exit()


@app.callback()
def shoal_command(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Distributed deep-learning training on PyTorch: the same math on one core, eight GPUs or eight hundred."""


app.command("train", help=train.HELP)(train.train)
app.command("verify")(verify.verify)
app.command("split")(plan.split)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("profile")(profile.profile)
app.command("launch", context_settings=launch.SETTINGS)(launch.launch)
app.command("evaluate")(train.evaluate)
app.command("report")(runs.report)
app.command("watch")(watch.watch)
app.command("diff")(runs.diff)
app.command("reproduce")(runs.reproduce)
app.command("sweep")(sweep.sweep)
app.add_typer(sweep.tune, name="tune", cls=Verbs)
app.command("ensemble")(sweep.ensemble)
app.command("replay")(runs.replay)
app.command("compress")(runs.compress)
app.command("rehearse")(verify.rehearse)
app.add_typer(submit.app, name="submit", cls=submit.WithDefault)
app.add_typer(federate.app, name="federate", cls=Verbs)
app.command("doctor")(doctor.doctor)
app.add_typer(checkpoint.app, name="checkpoint", cls=Verbs)
app.add_typer(coordinator.app, name="coordinator", cls=Verbs)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """The `shoal` command."""
    leave_without_collection()
    try:
        app()
    except ShoalError as error:
        _say(f"shoal: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if (fault := refused_file(error)) is None:
            raise
        _say(f"shoal: {fault}")
        sys.exit(fault.exit_code)


def _say(text: str) -> None:
    """On standard error; what a file or a user's code put into a message gives the terminal no orders."""
    print(escape_controls(text, encoding=sys.stderr.encoding or "utf-8"), file=sys.stderr)
