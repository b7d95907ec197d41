"""Reading a file that anybody may have put there: a regular file, and never more bytes than the caller allows; and what
files hold when a process ends.

A FIFO keeps its reader waiting for a writer, a device may have no end, a file may be larger than memory. So files are
opened without waiting, examined through the open descriptor, and read up to a limit. Each caller names the error that
its users expect and the repair that helps them.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import fcntl
import gc
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.errors import EnvironmentFault, ShoalError

Decoded = TypeVar("Decoded")

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

_REPAIRS = {
    errno.ENOSPC: "the disk is full; free some space, or give another place",
    errno.EDQUOT: "your share of the disk is used up; free some space, or give another place",
    errno.EROFS: "the file system is read-only; give another place",
    errno.EACCES: "you may not do that there; change the permissions, or give another place",
    errno.EEXIST: "a file stands where a folder is to be; move it, or give another place",
    errno.ENOTDIR: "a part of this path is a file and not a folder; move it, or give another place",
    errno.ENAMETOOLONG: "the name is too long for this file system; give a shorter one",
}
"""What a user can do where the system refuses a file, by the number of the error."""


def refused_file(error: OSError) -> EnvironmentFault | None:
    """The sentence where the system refuses a file in a way that a user can mend; None for any other error."""
    repair = _REPAIRS.get(error.errno or 0)
    return None if repair is None else EnvironmentFault(f"{error.filename or error.strerror}: {repair}")


@contextmanager
def open_file(path: Path, *, error: type[ShoalError], repair: str) -> Iterator[FileIO]:
    """The regular file `path`, unbuffered, at its first byte.

    Raises `error`, whose message ends with `repair`, where `path` is missing, is no regular file or cannot be opened,
    and where reading it fails inside the `with` block.
    """
    try:
        with FileIO(_descriptor(path, error, repair), "rb") as file:
            yield file
    except FileNotFoundError:
        raise error(f"{printable(path)} is missing{meant(path)}: {repair}") from None
    except OSError as failure:
        raise error(f"{printable(path)} cannot be read ({failure.strerror or failure}): {repair}") from failure


def read_file(path: Path, *, limit_bytes: int, error: type[ShoalError], repair: str) -> bytes:
    """All bytes of the regular file `path`. Raises `error` as `open_file` does, and beyond `limit_bytes`."""
    pieces: list[bytes] = []
    left = limit_bytes + 1
    with open_file(path, error=error, repair=repair) as file:
        while left and (piece := file.read(min(left, 1 << 20))):
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise error(f"{printable(path)} is larger than {limit_bytes} bytes: {repair}")
    return b"".join(pieces)


def read_json(path: Path, kind: type[Decoded], *, limit_bytes: int, error: type[ShoalError], repair: str) -> Decoded:
    """The JSON of the regular file `path`, as a `kind`. Raises `error` as `read_file` does, and for any other content:
    no JSON, values nested deeper than Python's stack, texts that are no Unicode, numbers beyond what Python converts.
    """
    content = read_file(path, limit_bytes=limit_bytes, error=error, repair=repair)
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as failure:  # msgspec's and Unicode's own errors are ValueErrors
        raise error(f"{printable(path)} is no JSON that can be read here ({failure}): {repair}") from failure


def printable(text: object) -> str:
    """`text` as a terminal and a log can take it: bytes of a file name that are not UTF-8 are escaped."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def meant(path: Path) -> str:
    """ " (did you mean runs/first?)" for a path that is not there, where its folder holds a name much like it: of the
    file or folder, or of the first folder on the way that is missing; or the same name with the suffix of a run file or
    a script. Else nothing.
    """
    try:
        missing = next((one for one in (*reversed(path.parents), path) if not one.exists()), None)
        there = [] if missing is None else [one for one in missing.parent.iterdir() if one.suffix == missing.suffix]
        whole = [f"{missing}{suffix}" for suffix in (".toml", ".py") if Path(f"{missing}{suffix}").is_file()]
    except (OSError, ValueError):
        return ""
    if whole:
        return f" (did you mean {' or '.join(map(printable, whole))}?)"
    stems = {one.stem: one for one in sorted(there)}
    near = [] if missing is None else difflib.get_close_matches(missing.stem, stems, n=1)
    if missing is None or not near:
        return ""
    found = stems[near[0]] / path.relative_to(missing)
    return f" (did you mean {printable(found if found.exists() else stems[near[0]])}?)"


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`SHOAL_CACHE` of `environ` where it is set, else ~/.cache/shoal. Nothing is created."""
    if chosen := environ.get("SHOAL_CACHE"):
        return Path(chosen).expanduser()
    return Path.home() / ".cache" / "shoal"


def _descriptor(path: Path, error: type[ShoalError], repair: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as failure:
        raise error(f"{printable(path)!r} is no file name ({failure}): {repair}") from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise error(f"{printable(path)} is {_KINDS.get(kind, 'a special file')}, not a regular file: {repair}")
    return descriptor


# A temporary folder that the next start removes where this process cannot: after `kill -9`.
#
# The owner holds a `flock` on the folder, which the kernel drops when the owner is gone, however it ends. So a folder
# of ours that can be locked belongs to nobody.


PREFIX = "shoal-run-"


def make_durable(path: Path) -> None:
    """Returns when the file or the folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder, until the end of the block; those that dead processes have left are removed first.

    Raises `EnvironmentFault` where none can be made.
    """
    try:
        base = Path(tempfile.gettempdir())
        _sweep(base)
        folder, fd = _made(base)
    except OSError as error:
        raise EnvironmentFault(
            f"no temporary folder can be made ({error}): ranks leave their last words there; set TMPDIR to a folder "
            "that can be written to"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _made(base: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        fd = _locked(folder)
        # Between the two lines another start may have taken the folder for a dead process's.
        if fd is not None and folder.is_dir():
            return folder, fd
        if fd is not None:
            os.close(fd)


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if folder.stat().st_uid == os.getuid() and (fd := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(fd)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where somebody else does, or the folder is gone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def leave_without_collection() -> None:
    """The end of this process leaves out the interpreter's last collection, which takes down torch, object by object:
    half a second.
    """
    atexit.unregister(_write_and_freeze)
    atexit.register(_write_and_freeze)


def _write_and_freeze() -> None:
    """What files have not written yet is written first: one of an object that refers to itself, as a logger with a
    callback does, is closed by that collection alone.
    """
    for text in (True, False):  # a text first goes into its buffer
        for each in gc.get_objects():
            if issubclass(type(each), TextIOWrapper if text else BufferedWriter):  # an `isinstance` may call its code
                with contextlib.suppress(Exception):  # closed, or its disk is full: as at the end of any process
                    each.flush()
    gc.freeze()
