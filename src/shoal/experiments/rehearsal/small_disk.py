"""A run directory on a file system of its own, which a rehearsal fills: a tmpfs of a few megabytes. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import EnvironmentFault
from shoal.temporary_folder import temporary_folder

FILLER, CHUNK_BYTES = "filler", 1 << 20


def why_no_small_disk() -> str | None:
    """Why there can be none here, as a sentence; None where there can."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        return "a file system of its own needs root and the command mount"
    with temporary_folder() as folder:
        try:
            with small_disk(folder / "disk", 1 << 20):
                return None
        except EnvironmentFault as error:
            return str(error)


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[None]:
    """`directory` is a file system of that size; its content stays behind when it goes. Raises `EnvironmentFault`."""
    directory.mkdir(parents=True)
    made = _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory))
    if made.returncode != 0:
        raise EnvironmentFault(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    kept = directory.with_name(f"{directory.name}.kept")
    try:
        yield
    finally:
        end_fill(directory)
        shutil.copytree(directory, kept, symlinks=True)
        _run("umount", "--lazy", str(directory))
    directory.rmdir()
    kept.rename(directory)


def fill(directory: Path) -> None:
    """Until not a byte is left."""
    with (directory / FILLER).open("wb", buffering=0) as file:
        for size in (CHUNK_BYTES, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def end_fill(directory: Path) -> None:
    """There is space again."""
    (directory / FILLER).unlink(missing_ok=True)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
