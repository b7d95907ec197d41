"""`shoal split`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.busy import busy
from shoal.cli.output import AsJson, Overrides
from shoal.standard_output import answer


def split(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file with a module of your own.")],
    overrides: Overrides = None,
    stages: Annotated[int, typer.Option("--stages", min=2, help="Stages to cut the chain into.")] = 2,
    yes: Annotated[bool, typer.Option("--yes", help="Write the keys into the run file without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Proposes how to split a module that declares nothing over tensor and pipeline, and writes it into the run file.

    Example: shoal split recipes/vit.toml --yes
    """
    from shoal.runfile.load import load_run

    loaded = load_run(run_file, overrides or ())  # a wrong file is refused before what follows imports torch
    from shoal.planning.split_proposal import propose, write_keys

    with busy("reading the module"):
        proposal = propose(loaded, stages=stages)
    if as_json:
        answer(json.dumps(proposal.to_json()))
    else:
        print("\n".join(proposal.lines()))
    if not proposal.keys():
        return
    asked = not as_json and sys.stdin.isatty()
    if yes or (asked and typer.confirm(f"\nWrite this into [model] of {run_file}?", default=False)):
        write_keys(run_file, proposal)
        if not as_json:
            print(f"written; prove it: shoal verify {run_file} layout.tensor=2")
    elif not as_json and not asked:
        print(f"\n--yes writes this into [model] of {run_file}")
