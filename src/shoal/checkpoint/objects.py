"""Where a checkpoint lies in a run directory, and how a file gets there so that it survives a crash.

    checkpoints/step-00000100/manifest.json   a committed checkpoint
    checkpoints/objects/<blake3>.safetensors  its content, shared by all checkpoints
    checkpoints/best                          a link to the best one, if `checkpoint.keep_best` asks for it
    checkpoints/latest                        the name of the newest one, and the hash of its manifest
    .tmp-*                                    not finished, or about to be deleted; never read, swept at a start

A file is durable when it is fsynced, its name when its folder is. So: write under a temporary name, fsync, rename,
fsync the folder (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). `Disk` does these calls between
labelled points, at which tests kill the process.

Objects are named by the blake3 hash of their bytes (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3", 2020), written
once, and read back before they count. Content that is there already costs one read and no write, and a file whose bytes
do not hash to its name is damaged.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from shoal.errors import CorruptCheckpoint, UsageError
from shoal.files import meant, open_file, printable

MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp-"
STAGED = "-staged-"
"""In the temporary names of files in which a rank lays out its share (`checkpoint/staging.py`)."""
_STEP = re.compile(r"step-([0-9]{8,18})\Z")


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

    @property
    def best(self) -> Path:
        """The link to the best checkpoint, where a run keeps one."""
        return self.root / "best"

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
        found = (step_of(entry.name) for entry in self.root.iterdir())
        return sorted((step for step in found if step is not None), reverse=True)


def step_name(step: int) -> str:
    """The name of the folder of the checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint has a folder of this name; None for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def temporary(path: Path, owner: str) -> Path:
    """Beside `path`, the name it has while `owner` has not finished with it."""
    return path.with_name(f"{TEMPORARY}{owner}-{path.name}")


OnPoint = Callable[[str], None]

ACTIONS = (
    "object/write",
    "object/fsync",
    "object/rename",
    "objects/fsync",
    "object/verify",
    "manifest/write",
    "manifest/fsync",
    "folder/fsync",
    "commit/rename",
    "commit/fsync",
    "latest/write",
    "latest/fsync",
    "latest/rename",
    "pointer/fsync",
    "retention/rename",
    "retention/fsync",
    "retention/delete",
    "retention/sweep",
)
POINTS = tuple(f"{action}.{moment}" for action in ACTIONS for moment in ("before", "after"))
"""Every label that a save can pass, in order."""


def unheard(label: str) -> None:
    """The listener for those who do not listen."""


class Disk:
    """Durable file operations; each `OSError` names its path.

    `on_point` hears "ACTION.before" and "ACTION.after" around every call that a crash can interrupt.
    """

    def __init__(self, on_point: OnPoint = unheard) -> None:
        self._on_point = on_point

    @contextmanager
    def point(self, action: str, path: Path) -> Iterator[None]:
        """One interruptible action on `path`."""
        self._on_point(f"{action}.before")
        with path_named(path):
            yield
        self._on_point(f"{action}.after")

    def write(self, path: Path, data: bytes | memoryview, *, kind: str) -> None:
        """Write `data` to `path` and fsync it; on failure nothing is left there."""
        try:
            self._write(path, memoryview(data), kind)
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def sync(self, path: Path, *, kind: str) -> None:
        """Makes what was written to `path` durable."""
        with open(path, "rb") as file, self.point(f"{kind}/fsync", path):
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path, *, action: str) -> None:
        """Give `source` the name `target`, atomically; a file of that name is replaced."""
        with self.point(action, target):
            os.replace(source, target)

    def sync_folder(self, path: Path, *, action: str) -> None:
        """Make the names inside `path` durable."""
        with self.point(action, path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, path: Path, *, action: str) -> None:
        """Delete the file `path` if it is there."""
        with self.point(action, path):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, data: memoryview, kind: str) -> None:
        with path_named(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            with self.point(f"{kind}/write", path):
                written = 0
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            with self.point(f"{kind}/fsync", path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def path_named(path: Path) -> Iterator[None]:
    """Calls on a file descriptor raise without a file name, and the name is what the user needs: add `path`."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def make_folders(places: Places) -> None:
    """Make the folders of `places`, durably, where they are missing. Raises `OSError`."""
    if not places.objects.is_dir():
        places.objects.mkdir(parents=True, exist_ok=True)
        for folder in (places.root, places.run_directory):
            Disk().sync_folder(folder, action="folder/fsync")


_CHUNK_BYTES = 4 << 20
"""One read: large, so that the thread that trains is asked for the interpreter's lock seldom."""


class Stored(NamedTuple):
    """An object that lies on the disk; `written` is false when it had been there before.

    `encoded`: it holds streams (`planes.py`), with differences from the object `base` if that is not empty.
    """

    digest: str
    nbytes: int
    written: bool
    encoded: bool = False
    base: str = ""


def store(data: memoryview, places: Places, *, disk: Disk, owner: str, file: Path | None = None) -> Stored:
    """Put `data` into the store unless a sound copy is there. Its name is durable after `settle`. `file` has the same
    bytes, beside the objects: it becomes one.
    """
    digest = blake3(data).hexdigest()
    path = places.object(digest)
    if damage(path, digest, nbytes=len(data)) is None:
        return Stored(digest, len(data), False)
    unfinished = temporary(path, owner) if file is None else file
    if file is None:
        disk.write(unfinished, data, kind="object")
    else:
        disk.sync(file, kind="object")
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
    """What is wrong with the file at `path`, as the end of a sentence; None when its bytes hash to `digest`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        if status.st_size != nbytes:
            return f"has {status.st_size} bytes, not {nbytes}"
        return None if _file_digest(path) == digest else "does not hash to its name: its bytes have changed"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except CorruptCheckpoint as error:
        return f"cannot be read ({error})"


def _file_digest(path: Path) -> str:
    """The blake3 hash of the bytes of `path`, read from the disk where the system lets us ask for that."""
    hasher = blake3()
    with open_file(path, error=CorruptCheckpoint, repair="check the disk") as file:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, os.fstat(file.fileno()).st_size + 1)))
        # Without this a file that was just written would be compared with the memory it was written from.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


# What a command was told to read, looked at before anything else: a wrong name is refused before torch is imported.


WEIGHTS = "give a safetensors file"


def require_folder(directory: Path) -> None:
    """Raises `UsageError` where there is no such folder."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder{meant(directory)}: give the folder of a run, such as runs/NAME")


def require_checkpoints(directory: Path) -> None:
    """Raises `UsageError` where the run directory has no checkpoint."""
    if not Places(directory).steps():
        raise UsageError(
            f"{directory} holds no checkpoint{meant(directory)}: give the folder of a run, such as runs/NAME"
        )


def require_checkpoint(source: Path) -> None:
    """Raises `UsageError` where `source` is neither a checkpoint nor a run directory with one."""
    if not (source / MANIFEST).exists() and not Places(source).steps():
        raise UsageError(f"{source} holds no checkpoint{meant(source)}; give a run directory or one of its checkpoints")


def require_weights(file: Path) -> None:
    """Raises `UsageError` where `file` is missing, or does not begin as a safetensors file does."""
    try:
        with open_file(file, error=UsageError, repair=WEIGHTS), safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, ValueError) as error:
        raise UsageError(f"{printable(file)} cannot be read as a safetensors file ({error}): {WEIGHTS}") from error
