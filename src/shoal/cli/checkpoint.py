"""`shoal checkpoint ls|verify`: reads checkpoints without a job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

app = typer.Typer(help="Reads checkpoints without a job.", no_args_is_help=True, rich_markup_mode=None)

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


@app.command("ls")
def ls(directory: RunDirectory, as_json: AsJson = False) -> None:
    """Lists the checkpoints of a run, newest first.

    Example: shoal checkpoint ls runs/stdlib-gpt
    """
    from shoal.checkpoint.inspect import listing

    rows = [msgspec.to_builtins(row) for row in listing(directory)]
    if as_json:
        print(json.dumps({"checkpoints": rows}))
        return
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created"])) if row["created"] else "unreadable"
        state = "whole" if row["verified"] else "DAMAGED: 'shoal checkpoint verify' says where"
        print(f"step {row['step']:>8}  {when}  {row['tensors'] or 0} tensors, {row['nbytes'] or 0:,} bytes  {state}")
    if not rows:
        print(f"{directory} holds no checkpoint")


@app.command("verify")
def verify(
    directory: RunDirectory,
    step: Annotated[int | None, typer.Option(help="Only the checkpoint of this step; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Reads every byte of the checkpoints again and compares hashes; exit 6 where one is not what was written.

    Example: shoal checkpoint verify runs/stdlib-gpt
    """
    from shoal.checkpoint.inspect import verify as examine

    found = [msgspec.to_builtins(finding) for finding in examine(directory, step)]
    if as_json:
        print(json.dumps({"findings": found}))
    else:
        print(
            "\n".join(finding["sentence"] for finding in found) if found else f"{directory}: every checkpoint is whole"
        )
    raise typer.Exit(6 if found else 0)
