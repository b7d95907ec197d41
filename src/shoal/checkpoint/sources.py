"""What a command was told to read, looked at before anything else: a wrong name is refused before torch is imported."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from shoal.checkpoint.objects import MANIFEST, Places
from shoal.errors import UsageError
from shoal.files import open_file, printable

WEIGHTS = "give a safetensors file"


def require_folder(directory: Path) -> None:
    """Raises `UsageError` where there is no such folder."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder: give the folder of a run, such as runs/NAME")


def require_checkpoints(directory: Path) -> None:
    """Raises `UsageError` where the run directory has no checkpoint."""
    if not Places(directory).steps():
        raise UsageError(f"{directory} holds no checkpoint: give the folder of a run, such as runs/NAME")


def require_checkpoint(source: Path) -> None:
    """Raises `UsageError` where `source` is neither a checkpoint nor a run directory with one."""
    if not (source / MANIFEST).exists() and not Places(source).steps():
        raise UsageError(f"{source} holds no checkpoint; give a run directory or one of its checkpoints")


def require_weights(file: Path) -> None:
    """Raises `UsageError` where `file` is missing, or does not begin as a safetensors file does."""
    try:
        with open_file(file, error=UsageError, repair=WEIGHTS), safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, ValueError) as error:
        raise UsageError(f"{printable(file)} cannot be read as a safetensors file ({error}): {WEIGHTS}") from error
