"""Arguments and options that several verbs have, and files that a verb writes, checked before it works for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the file's.")]
ScriptOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]... [ARGS]...", help="Keys of the run; after --, a script's arguments."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="C.toml", help="The machine; default: layout.cluster, else CPU cores."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]

PICTURES = (".png", ".svg", ".pdf")


def output_file(path: Path | None) -> Path | None:
    """A callback of options: `path` in a folder that is there, or `typer.BadParameter`."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.absolute().parent}; make it, or give another")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the name of a file")
    return path


def picture_file(path: Path | None) -> Path | None:
    """As `output_file`, for what is drawn."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(
            f"{path}: a picture is written as {', '.join(PICTURES)}; give it one of these suffixes"
        )
    return output_file(path)
