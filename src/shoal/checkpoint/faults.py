"""What went wrong in the background, as a sentence: what was found, what it means for the run, the repair."""

from __future__ import annotations

import errno
from pathlib import Path

from shoal.errors import ShoalError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def sentence(error: Exception, *, step: int, root: Path) -> str:
    """Why the checkpoint of `step` under `root` was not saved; training goes on, so the sentence must say it all."""
    return f"the checkpoint of step {step} was not saved, and the one before it stays: {_reason(error, root)}"


def sentence_after_commit(error: OSError, *, step: int, root: Path) -> str:
    """Why the end of a save did not succeed, though the checkpoint of `step` is there and counts."""
    found = _reason(error, root)
    return f"the checkpoint of step {step} is saved, but `latest` was not changed or older ones not deleted: {found}"


def _reason(error: Exception, root: Path) -> str:
    if isinstance(error, ShoalError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"a rank did not answer ({error}); look for a dead or stuck rank"
    if isinstance(error, OSError):
        where = error.filename or root
        return f"{where}: {error.strerror or error}; {_repair(error)}"
    return f"{type(error).__name__}: {error}; please report this as a defect of Shoal"


def _repair(error: OSError) -> str:
    if error.errno in _FULL:
        return "free space on that disk, or lower checkpoint.keep"
    if error.errno in _READ_ONLY:
        return "make the folder writable, or point run.directory to one that is"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f), or lower checkpoint.object_bytes"
    return "check the disk and its mount"
