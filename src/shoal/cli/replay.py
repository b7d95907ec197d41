"""`shoal replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.busy import busy
from shoal.cli.output import AsJson
from shoal.standard_output import answer


def replay(
    capsule: Annotated[Path, typer.Argument(metavar="CAPSULE", help="The capsule.zip of a run that failed.")],
    run_directory: Annotated[
        Path | None, typer.Option("--run-directory", help="Where the checkpoint lies, if not in the capsule.")
    ] = None,
    any_version: Annotated[bool, typer.Option("--any-version", help="Also a capsule of another version.")] = False,
    as_json: AsJson = False,
) -> None:
    """Computes the step at which a run failed again, on one CPU process: does it fail in the same way?

    Call it where the run was started, so that your own code is found. Exit 6 where it does not repeat the failure.

    Example: shoal replay runs/digits/capsule.zip
    """
    from shoal.experiments.capsule_replay import replay_capsule
    from shoal.temporary_folder import temporary_folder

    with temporary_folder() as folder, busy("computing the step that failed"):
        found = replay_capsule(capsule, folder, run_directory=run_directory, any_version=any_version)
    if as_json:
        answer(msgspec.json.encode(found).decode())
    else:
        for step in found.steps:
            recorded = "" if step.recorded is None else f", {step.recorded:.8g} was recorded"
            print(f"step {step.step}: loss {step.loss:.8g}{recorded}")
        if found.sample_ids:
            print(f"samples of step {found.step}: {' '.join(map(str, found.sample_ids[:32]))}"
                  + (" ..." if len(found.sample_ids) > 32 else ""))  # fmt: skip
        if found.traceback:
            print(found.traceback.rstrip())
        print(found.sentence)
    raise typer.Exit(6 if found.same is False else 0)
