"""What lies in a run directory, for people: `shoal checkpoint ls` and `shoal checkpoint verify`. Changes nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.checkpoint.load import checkpoints, read_manifest
from shoal.checkpoint.places import MANIFEST, Places
from shoal.checkpoint.verify import Finding, findings
from shoal.errors import UsageError, VerificationFailed


class Row(msgspec.Struct, frozen=True):
    """One checkpoint. `created` is in unix seconds; what an unreadable manifest would have said is None.

    `nbytes` counts the objects that the checkpoint names, those it shares with others included.
    """

    step: int
    created: float | None
    nbytes: int | None
    tensors: int | None
    verified: bool


def listing(directory: Path) -> list[Row]:
    """A row for each checkpoint of a run directory, newest first; every object is hashed."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder: give the folder of a run, such as runs/NAME")
    return [_row(folder, directory) for folder in checkpoints(directory)]


def verify(directory: Path, step: int | None = None) -> list[Finding]:
    """What is wrong with the checkpoint of `step`, or with any when it is None; `UsageError` if it is not there."""
    folders = checkpoints(directory)
    if not folders:
        raise UsageError(f"{directory} holds no checkpoint: give the folder of a run, such as runs/NAME")
    if step is not None:
        folders = [folder for folder in folders if folder == Places(directory).step(step)]
        if not folders:
            raise UsageError(f"{directory} has no checkpoint of step {step}: `shoal checkpoint ls` shows those it has")
    return [finding for folder in folders for finding in _findings(folder, directory)]


def _findings(folder: Path, directory: Path) -> list[Finding]:
    try:
        return list(findings(read_manifest(folder), directory))
    except VerificationFailed as error:
        return [Finding(_step(folder), str(folder / MANIFEST), [], str(error))]


def _row(folder: Path, directory: Path) -> Row:
    try:
        manifest = read_manifest(folder)
    except VerificationFailed:
        return Row(_step(folder), None, None, None, False)
    verified = not any(findings(manifest, directory))
    return Row(manifest.step, manifest.created, sum(manifest.objects.values()), len(manifest.tensors), verified)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
