"""One run at a time in a run directory: a `flock` on `.lock`.

The lock belongs to the open file, which ranks inherit by descriptor: it is held until the last of them is gone, even
when the launcher was killed first, and the kernel drops it then. A file left behind is no obstacle. The file's text
(holder's pid, host) serves the refusal, and tells ranks that are just ending, because their launcher was killed, from a
run that goes on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from shoal.errors import EnvironmentFault, InUse

FILE_NAME = ".lock"
_MOST_BYTES = 4096
ENDING_S = 10.0
"""How long a lock is waited for whose holder is gone: the kernel ends ranks with their launcher, but not at once."""
_POLL_S = 0.02


class Holder(msgspec.Struct, frozen=True):
    """Who took the lock."""

    pid: int
    host: str


class RunLock:
    """The lock of one run directory. Hand `fd` to every rank (`pass_fds`), so that they hold it too.

    `shared`: by the launchers of one run on several hosts; a run of its own is refused beside them.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        self.path, self._how = directory / FILE_NAME, fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The descriptor that holds the lock."""
        if self._fd is None:
            raise RuntimeError(f"{self.path} is not locked: acquire it before handing it on")
        return self._fd

    def acquire(self) -> None:
        """Take the lock, making the directory where needed. Raises `InUse`, or `EnvironmentFault`.

        Waits for ranks that outlive their launcher for a moment.
        """
        fd = _open(self.path)
        deadline_s = time.monotonic() + ENDING_S
        try:
            while not self._takes(fd, wait=time.monotonic() < deadline_s):
                time.sleep(_POLL_S)
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(Holder(os.getpid(), socket.gethostname())), 0)
        except BlockingIOError as taken:
            held_by = _holder(fd)
            os.close(fd)
            raise InUse(_refusal(self.path, held_by)) from taken
        except OSError as error:
            os.close(fd)
            raise EnvironmentFault(_cannot(self.path, error)) from error
        self._fd = fd

    def _takes(self, fd: int, *, wait: bool) -> bool:
        """Whether the lock was free; raises `BlockingIOError` where it is not worth to `wait` for it."""
        try:
            fcntl.flock(fd, self._how | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait and _is_gone(_holder(fd)):
                return False
            raise
        return True

    def release(self) -> None:
        """Let go of this process's hold. Ranks that still live keep theirs, as the lock is the open file's."""
        if self._fd is not None:
            # Not LOCK_UN: that would unlock the open file for the ranks, too.
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(directory: Path) -> bool:
    """Whether a run holds the lock of `directory` now: a look, which takes nothing and makes no file."""
    try:
        fd = os.open(directory / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EnvironmentFault(_cannot(path, error)) from error


def _cannot(path: Path, error: OSError) -> str:
    directory = path.parent
    if error.errno in (errno.ENOLCK, errno.ENOTSUP):
        return f"the run directory {directory} cannot be locked ({error.strerror}): use a file system that has locks"
    for folder in (directory, *directory.parents):
        if folder.exists() and not folder.is_dir():
            needed = "the run directory" if folder == directory else f"a folder of the run directory {directory}"
            return f"{folder} is a file, and should be {needed}: move it away, or set run.directory to another"
    return (
        f"the run directory {directory} cannot be written ({error.strerror}): make it writable, or set run.directory "
        "to another"
    )


def _holder(fd: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(fd, _MOST_BYTES, 0), type=Holder)
    except msgspec.DecodeError:
        # Between the holder's lock and its first write the file is still empty.
        return None


def _is_gone(holder: Holder | None) -> bool:
    """Whether the process that took the lock ran on this host and has ended."""
    if holder is None or holder.host != socket.gethostname():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # of another user, and alive
        return False
    return False


def _refusal(path: Path, held_by: Holder | None) -> str:
    if _is_gone(held_by):
        assert held_by is not None
        return (
            f"the run directory {path.parent} is in use by ranks that process {held_by.pid} started, which has ended: "
            f"one run writes to it at a time; wait for them, stop them (fuser {path} names them), or set run.directory "
            "to another"
        )
    who = f"process {held_by.pid} on {held_by.host}" if held_by else "another process"
    stop = f"stop it (kill {held_by.pid})" if held_by else "stop it"
    return (
        f"the run directory {path.parent} is in use by {who}, or by ranks that it started: "
        f"one run writes to it at a time; wait for it, {stop}, or set run.directory to another"
    )
