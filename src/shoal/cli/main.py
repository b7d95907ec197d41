"""`shoal VERB`: parse, call, print. Errors that Shoal raises on purpose become a sentence and an exit code here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import shoal
from shoal.cli import bench, checkpoint, doctor, evaluate, plan, report, simulate, train, verify
from shoal.errors import ShoalError


class Verbs(TyperGroup):
    """A list of verbs with their whole first paragraph, which click would cut at 45 characters."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list; called for `--help`."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        texts = {name: (verb.help or "").partition("\n\n")[0] for name, verb in verbs if verb and not verb.hidden}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in texts.items()])


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


app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("evaluate")(evaluate.evaluate)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.add_typer(checkpoint.app, name="checkpoint", cls=Verbs)
app.add_typer(bench.app, name="bench", cls=Verbs)


def main() -> None:
    """The `shoal` command."""
    try:
        app()
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
