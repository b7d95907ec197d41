"""`shoal reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.output import AsJson
from shoal.standard_output import answer


def reproduce(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run that has ended.")],
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Where it trains again; default: RUN_DIR-again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Trains a run again and says whether it is bitwise the same, or what differs; exit 6 where it is not.

    Example: shoal reproduce runs/digits
    """
    from shoal.cli.diff import sentences
    from shoal.experiments.reproduce import reproduce as again

    found = again(directory, into or directory.with_name(directory.name + "-again"))
    same = found.diff.same
    if as_json:
        answer(msgspec.json.encode({**msgspec.structs.asdict(found), "same": same}, enc_hook=str).decode())
    else:
        verdict = "bitwise the same" if same else "not the same"
        print(f"{found.directory}: {verdict}")
        print("\n".join([*(f"changed since: {sentence}" for sentence in found.changed), *sentences(found.diff)]))
    raise typer.Exit(0 if same else 6)
