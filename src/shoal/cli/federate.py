"""`shoal federate`: many owners train one model, simulated here or over the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Trains one model with many owners of data, who keep it.")

RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file with a table [federated].")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the file's.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


@app.command()
def simulate(run_file: RunFileArgument, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Plays all rounds with simulated clients, in simulated time; leaves a report and the model.

    Example: shoal federate simulate recipes/federated-digits.toml federated.kind=scaffold
    """
    from shoal.runfile.load import load_run

    loaded = load_run(run_file, overrides or ())  # a wrong file is refused before what follows imports torch
    from shoal.recipes.federated import simulate

    def show(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    result = simulate(loaded, told=show)
    if as_json:
        print(json.dumps(result))
