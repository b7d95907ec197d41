"""What a failing rank leaves behind: one record, written whole, in the launcher's failure folder.

The record's time is in nanoseconds, as ranks fall within the same millisecond; `secondary` marks an error that only
echoes another rank's end (a collective that lost its peer), so that the launcher can show the cause first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from shoal.errors import CollectiveError, EnvironmentFault, OutOfMemory, ShoalError, UserCodeError
from shoal.launcher.devices import memory_limit
from shoal.launcher.environment import Place
from shoal.standard_output import escape_controls

FAILURE_FOLDER = "SHOAL_FAILURE_FOLDER"
TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"
GIB = 1 << 30
_MOST_TEXT = 200_000
_LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib"))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# By name: this module runs in ranks that may not have imported torch yet.
_OUT_OF_MEMORY = {"MemoryError", "OutOfMemoryError"}
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""A disk that is full, or that can only be read. ENOSPC is also what the kernel says of semaphores, watches of files,
and other things that are used up; then, as where a file is written that is open already, no file is named.
"""
_LOST_PEER = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_TEXTS = ("Connection closed by peer", "Connection reset by peer")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why one rank ended. `traceback` is empty where the message is the answer."""

    rank: int
    host: str
    pid: int
    time_ns: int
    exit_code: int
    kind: str
    message: str
    traceback: str = ""
    secondary: bool = False

    @property
    def text(self) -> str:
        """What to show of it."""
        return (self.traceback or self.message or self.kind).rstrip()

    @property
    def headline(self) -> str:
        """Its kind and its message's first line."""
        return f"{self.kind}: {self.message.strip().partition(chr(10))[0]}"


@contextlib.contextmanager
def report_failure(place: Place, folder: Path | None, *, torchrun_file: Path | None = None) -> Iterator[None]:
    """Turn whatever escapes into a record in `folder`, and end the process with its exit code.

    Without a folder (another launcher's rank) the text goes to standard error, and into the file that torchrun reads
    its summary from. The end is `os._exit`: neither a thread that hangs nor a teardown in C++ may keep a failed rank
    alive.
    """
    try:
        yield
    except BaseException as error:
        failure = failure_of(error, place.rank)
        _leave(failure, folder, torchrun_file)


def failure_of(error: BaseException, rank: int) -> Failure:
    """The record of `error`. Errors that Shoal raises on purpose, requests to exit, and what one sentence explains
    carry no traceback.
    """
    purposeful = isinstance(error, ShoalError | SystemExit | KeyboardInterrupt)
    explained = _is_lost_peer(error) or _unwritable_file(error) is not None or is_out_of_memory(error)
    trace = "" if purposeful or explained else _trace(error)
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        time_ns=time.time_ns(),
        exit_code=_exit_code(error),
        kind=OutOfMemory.__name__ if is_out_of_memory(error) else type(error).__name__,
        # The end of a traceback says most; the start of a message does.
        message=_message(error)[:_MOST_TEXT],
        traceback=trace[-_MOST_TEXT:],
        secondary=is_secondary(error),
    )


def _trace(error: BaseException) -> str:
    """The traceback; of an error in code that Shoal called, only that code's own part."""
    summary = traceback.TracebackException.from_exception(error)
    ours = [index for index, frame in enumerate(summary.stack) if frame.filename.startswith(_PACKAGE)]
    if ours and ours[-1] < len(summary.stack) - 1:
        summary.stack = traceback.StackSummary.from_list(summary.stack[ours[-1] + 1 :])
    return "".join(summary.format())


def read_failures(folder: Path) -> list[Failure]:
    """All records in the folder."""
    return [msgspec.json.decode(path.read_bytes(), type=Failure) for path in sorted(folder.glob("rank-*.json"))]


def write_failure(failure: Failure, folder: Path) -> None:
    """Write the record so that a reader finds the whole of it or nothing."""
    path = folder / f"rank-{failure.rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(failure))
    partial.replace(path)


def write_for_torchrun(failure: Failure, path: Path) -> None:
    """Write what torchrun shows of a rank; it takes the earliest by `timestamp`, in seconds, for the cause."""
    message = escape_controls(failure.text)  # torchrun prints it as it is
    path.write_bytes(msgspec.json.encode({"message": message, "timestamp": failure.time_ns // 10**9}))


def _leave(failure: Failure, folder: Path | None, torchrun_file: Path | None) -> NoReturn:
    try:
        if folder is not None:
            write_failure(failure, folder)
            if failure.rank != 0 and failure.exit_code != 0:  # into its log; rank 0 has the terminal
                _say(failure.text)
        elif failure.exit_code != 0:
            _say(f"rank {failure.rank} ({failure.host}, pid {failure.pid}): {failure.text}")
            if torchrun_file is not None:
                write_for_torchrun(failure, torchrun_file)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # In a `finally`: a full disk or a closed terminal must not turn this exit into a hang.
        os._exit(failure.exit_code)


def _say(text: str) -> None:
    print(escape_controls(text, encoding=sys.stderr.encoding or "utf-8"), file=sys.stderr)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, ShoalError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return _system_exit_code(error.code)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if _is_lost_peer(error):
        return CollectiveError.exit_code
    if isinstance(error, OSError) and error.errno in _DISK:
        return EnvironmentFault.exit_code
    return OutOfMemory.exit_code if is_out_of_memory(error) else 1


def _system_exit_code(code: object) -> int:
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else f"exit({error.code})"
    if _is_lost_peer(error):
        return f"lost the connection to another rank ({str(error).partition(chr(10))[0]})"
    if isinstance(error, UserCodeError):
        return f"{error}{_place(error)}"
    if isinstance(error, OSError) and (path := _unwritable_file(error)) is not None:
        return f"{path} cannot be written ({error.strerror}): mend that disk, or write to another{_place(error)}"
    return _memory_message(error) if is_out_of_memory(error) else str(error)


def _place(error: Exception) -> str:
    """Where the user's own code was, in brackets: the innermost line that is neither Shoal's nor a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", _PACKAGE, *_LIBRARIES))]
    own = [frame for frame in own if not {"site-packages", "dist-packages"}.intersection(Path(frame.filename).parts)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _memory_message(error: BaseException) -> str:
    """What was asked for, and what there is."""
    # CUDA's message says both; the host's only what was asked for, if that.
    if str(error).startswith("CUDA"):
        return ". ".join(str(error).split(". ")[:3])
    limit, asked = memory_limit(), re.search(r"(\d+) bytes|allocate ([\d.]+ [KMGT]iB)", str(error))
    wanted = "more memory" if asked is None else asked[2] or f"{int(asked[1]) / GIB:.2f} GiB"
    said = f" ({str(error).splitlines()[0]})" if asked is None and str(error) else ""
    if limit is None:
        return f"out of memory{said}: {wanted} could not be had"
    there = f"{limit.available_bytes / GIB:.2f} GiB are left of {limit.total_bytes / GIB:.2f} GiB"
    return f"out of memory{said}: asked for {wanted}, and {there} ({limit.limited_by})"


def _unwritable_file(error: BaseException) -> str | None:
    """The file whose disk is full, or can only be read, where `error` names one."""
    return error.filename if isinstance(error, OSError) and error.errno in _DISK else None


def _is_lost_peer(error: BaseException) -> bool:
    """An error of torch.distributed's own, whose traceback is a page of C++ frames."""
    return type(error).__name__ in _LOST_PEER


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory."""
    named = any(kind.__name__ in _OUT_OF_MEMORY for kind in type(error).__mro__)
    # PyTorch's allocator for the host raises a plain RuntimeError.
    return named or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def is_secondary(error: BaseException) -> bool:
    """Whether the error only echoes the end of another rank."""
    if isinstance(error, CollectiveError) or _is_lost_peer(error):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER_TEXTS)
