"""Files that a verb writes, checked before it works for them."""

from __future__ import annotations

from pathlib import Path

import typer

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
