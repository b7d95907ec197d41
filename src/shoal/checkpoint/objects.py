"""Where the parts of a checkpoint lie inside a run directory, and what unfinished parts are called.

Inside the run directory:

    checkpoints/step-00000100/manifest.json   a committed checkpoint
    checkpoints/objects/<blake3>.safetensors  its content, shared by all checkpoints
    checkpoints/latest                        the name of the newest one, for people and scripts
    .tmp-*                                    not finished, or about to be deleted; never read, swept at a start

The store of objects: files named by the blake3 hash of their bytes, written once, and verified by reading back.

Content that is already there costs one read and no write. The hash also makes damage visible: a file whose bytes do
not hash to its name is not the object. Source: O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3" (2020).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from shoal.checkpoint.durable import Disk
from shoal.errors import CorruptCheckpoint

MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp-"
_STEP = re.compile(r"step-(\d{8,18})\Z")


@dataclass(frozen=True)
class Places:
    """The paths of the checkpoints of one run directory."""

    run_directory: Path

    @property
    def root(self) -> Path:
        """The folder of all checkpoints."""
        return self.run_directory / "checkpoints"

    @property
    def objects(self) -> Path:
        """The folder of all objects."""
        return self.root / "objects"

    @property
    def latest(self) -> Path:
        """The file that names the newest checkpoint."""
        return self.root / "latest"

    def step(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return self.root / step_name(step)

    def manifest(self, step: int) -> Path:
        """The manifest of the checkpoint of `step`."""
        return self.step(step) / MANIFEST

    def object(self, digest: str) -> Path:
        """The object whose bytes hash to `digest`."""
        return self.objects / f"{digest}{SUFFIX}"

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, newest first; empty when there is no such folder."""
        if not self.root.is_dir():
            return []
        found = (_STEP.match(entry.name) for entry in self.root.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)


def step_name(step: int) -> str:
    """The name of the folder of the checkpoint of `step`."""
    return f"step-{step:08d}"


def temporary(path: Path, owner: str) -> Path:
    """Beside `path`, the name it has while `owner` has not finished with it."""
    return path.with_name(f"{TEMPORARY}{owner}-{path.name}")


_CHUNK_BYTES = 4 << 20
"""One read: large, so that the thread that trains is asked for the interpreter's lock seldom."""


class Stored(NamedTuple):
    """An object that lies on the disk; `written` is false when it had been there before."""

    digest: str
    nbytes: int
    written: bool


def store(data: memoryview, places: Places, *, disk: Disk, owner: str) -> Stored:
    """Put `data` into the store unless a sound copy is there. Its name is durable after `settle`."""
    digest = blake3(data).hexdigest()
    path = places.object(digest)
    if damage(path, digest, nbytes=len(data)) is None:
        return Stored(digest, len(data), False)
    unfinished = temporary(path, owner)
    disk.write(unfinished, data, kind="object")
    disk.rename(unfinished, path, action="object/rename")
    return Stored(digest, len(data), True)


def settle(stored: list[Stored], places: Places, *, disk: Disk) -> None:
    """Make the names of `stored` durable and read back what was written; `CorruptCheckpoint` if it differs."""
    disk.sync_folder(places.objects, action="objects/fsync")
    for item in stored:
        path = places.object(item.digest)
        with disk.point("object/verify", path):
            problem = damage(path, item.digest, nbytes=item.nbytes) if item.written else None
        if problem:
            raise CorruptCheckpoint(f"{path} {problem} right after it was written: check this disk")


def damage(path: Path, digest: str, *, nbytes: int) -> str | None:
    """What is wrong with the object at `path`, as the end of a sentence; None when it is sound."""
    try:
        found = path.stat().st_size
        if found != nbytes:
            return f"has {found} bytes, not {nbytes}"
        return None if file_digest(path) == digest else "does not hash to its name: its bytes have changed"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def file_digest(path: Path) -> str:
    """The blake3 hash of the bytes of `path`, read from the disk where the system lets us ask for that."""
    hasher = blake3()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        # Without this a file that was just written would be compared with the memory it was written from.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()
