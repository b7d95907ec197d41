"""A rank's spill file: what it keeps on disk between two uses, past the page cache, with a checksum for each piece.

The file has no name (`O_TMPFILE`), so that the kernel frees it when the process ends, however it ends: after `kill -9`
nothing is left to sweep. Where a file system knows no such files, it is made under a name that is removed at once; the
next start removes what a kill between the two has left. It holds nothing that outlives the run: that is in checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from shoal import units
from shoal.errors import EnvironmentFault, VerificationFailed
from shoal.state import works_in_streams

BLOCK_BYTES = 4096
"""What offsets, lengths and addresses are multiples of under `O_DIRECT`."""
PREFIX = ".shoal-spill-"
MADV_POPULATE_READ = 22
"""Of Linux; Python has no name for it yet."""

Transfer = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`: from a file, buffers and an offset to the bytes that were moved."""


def rounded(size_bytes: int) -> int:
    """The next multiple of `BLOCK_BYTES`."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def aligned_buffer(size_bytes: int, device: torch.device) -> Tensor:
    """Host memory of whole blocks, uint8, aligned to them; pinned where `device` works in streams."""
    if works_in_streams(device):
        return torch.empty(rounded(size_bytes), dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, rounded(size_bytes)), dtype=np.uint8))


@dataclass
class Piece:
    """A place in the file. `digest` is that of what was written last; empty before."""

    offset: int
    size_bytes: int
    digest: bytes = b""


class Mapped:
    """A place in a file that is memory, uint8."""

    def __init__(self, memory: mmap.mmap, size_bytes: int) -> None:
        self._memory = memory
        self.tensor = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))[:size_bytes]

    def ahead(self) -> None:
        """Asks the kernel to begin to read it."""
        self._memory.madvise(mmap.MADV_WILLNEED)


class SpillFile:
    """A file in `folder`, which is made where it is missing. `direct` says whether it goes past the page cache.

    `read` and `write` move bytes; tests put faults there.
    """

    def __init__(self, folder: Path, *, read: Transfer = os.preadv, write: Transfer = os.pwritev) -> None:
        self._folder, self._read, self._write = folder, read, write
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            self._fd, self.direct = _opened(folder)
        except OSError as error:
            raise self._fault("be made", error) from error
        self.size_bytes = 0

    def another(self) -> SpillFile:
        """A further one in the same folder."""
        return SpillFile(self._folder)

    def allocate(self, size_bytes: int) -> Piece:
        """A new place. Raises `EnvironmentFault` where the disk is full: before anything is lost."""
        piece = Piece(self.size_bytes, size_bytes)
        try:
            os.posix_fallocate(self._fd, piece.offset, rounded(size_bytes))
        except OSError as error:
            raise self._fault(f"grow by {units.memory_size(size_bytes)}", error) from error
        self.size_bytes += rounded(size_bytes)
        return piece

    def mapped(self, size_bytes: int) -> Mapped:
        """Zeros in a new place, as memory that the kernel reads and writes through its page cache: without a checksum.
        Raises `EnvironmentFault` where the disk is full.
        """
        piece = self.allocate(size_bytes)
        _die_of_lost_pages()
        try:
            return Mapped(mmap.mmap(self._fd, rounded(size_bytes), offset=piece.offset), size_bytes)
        except OSError as error:
            raise self._fault("be mapped into memory", error) from error

    def write(self, piece: Piece, buffer: Tensor) -> int:
        """Writes `buffer`, from `aligned_buffer`. The bytes that went to the disk. Raises `EnvironmentFault`."""
        view = memoryview(buffer.numpy())  # pyright: ignore[reportArgumentType]
        piece.digest = blake3(view[: piece.size_bytes]).digest()
        return self._move(self._write, piece, view, "be written")

    def read(self, piece: Piece, buffer: Tensor) -> int:
        """Fills `buffer`. The bytes that came from the disk. Raises `VerificationFailed` for other bytes than were
        written, `EnvironmentFault` for none."""
        view = memoryview(buffer.numpy())  # pyright: ignore[reportArgumentType]
        moved = self._move(self._read, piece, view, "be read")
        self._require(piece, view)
        return moved

    def look(self, piece: Piece) -> Tensor:
        """What was written last, uint8, as pages of the file: the host needs no memory of its own for it, and it holds
        until the piece is written again. Raises as `read` does.
        """
        try:
            memory = mmap.mmap(self._fd, rounded(piece.size_bytes), access=mmap.ACCESS_COPY, offset=piece.offset)
            _populate(memory)
        except OSError as error:
            raise self._fault("be read", error) from error
        found = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))[: piece.size_bytes]
        self._require(piece, memoryview(found.numpy()))  # pyright: ignore[reportArgumentType]
        return found

    def close(self) -> None:
        """Gives its space back."""
        os.close(self._fd)

    def _require(self, piece: Piece, view: memoryview) -> None:
        if blake3(view[: piece.size_bytes]).digest() != piece.digest:
            raise VerificationFailed(
                f"the disk under {self._folder} gave back other bytes than were written to the spill file: check the "
                "disk, or set memory.offload.folder to another one; the newest checkpoint is whole, start again from it"
            )

    def _move(self, transfer: Transfer, piece: Piece, view: memoryview, what: str) -> int:
        done, length = 0, rounded(piece.size_bytes)
        try:
            while done < length:
                moved = transfer(self._fd, [view[done:length]], piece.offset + done)
                if moved <= 0:
                    raise OSError(errno.EIO, "the file ended")
                done += moved
        except OSError as error:
            raise self._fault(what, error) from error
        return done

    def _fault(self, what: str, error: OSError) -> EnvironmentFault:
        free = ""
        with contextlib.suppress(OSError):
            there = os.statvfs(self._folder)
            free = f", of whose disk {units.memory_size(there.f_bavail * there.f_frsize)} are free"
        return EnvironmentFault(
            f"the spill file in {self._folder}{free} could not {what} ({error.strerror}): free space there, or set "
            "memory.offload.folder to a folder on another disk; the newest checkpoint is whole, start again from it"
        )


def _die_of_lost_pages() -> None:
    """A page that the disk has lost ends the process by SIGBUS. Python would print all stacks before; those of threads
    that go on meanwhile can end it by SIGSEGV instead, which says something else.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGBUS, signal.SIG_DFL)


def _populate(memory: mmap.mmap) -> None:
    """Reads it, so that an error of the disk is an `OSError`. Before Linux 5.14 it would be a signal, at its use."""
    try:
        memory.madvise(MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _opened(folder: Path) -> tuple[int, bool]:
    """A file without a name, and whether it goes past the page cache."""
    for direct in (os.O_DIRECT, 0):
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | direct, 0o600), bool(direct)
    fd, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    os.unlink(name)
    return fd, False


def _sweep(folder: Path) -> None:
    """What was killed between making a name and removing it. Another rank that is just there has its file open."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            path.unlink()


# Bytes between the tiers of a rank's memory, counted where they are moved, and what waiting for them took.


class Traffic:
    """Since the last `take_figures`; the lanes add to it.

    memory/to_device_bytes, memory/to_host_bytes        between device and host
    memory/disk_read_bytes, memory/disk_written_bytes   in whole blocks
    memory/exposed_s                                    what the step stood still for moves and for the disk
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: dict[str, float] = dict.fromkeys(NAMES, 0.0)

    def add(self, **figures: float) -> None:
        """Counts them."""
        with self._lock:
            for name, value in figures.items():
                self._figures[name] += value

    def take_figures(self) -> dict[str, float]:
        """The measurements of a step, by name, and forgets them."""
        with self._lock:
            found = {f"memory/{name}": value for name, value in self._figures.items()}
            self._figures = dict.fromkeys(NAMES, 0.0)
        return found


class DiskTraffic(Traffic):
    """Of state that goes between disk and host alone: what is copied there never sees the device."""

    def __init__(self, whole: Traffic) -> None:
        super().__init__()
        self._whole = whole

    def add(self, **figures: float) -> None:
        """Counts what the disk moved, and what waited for it."""
        self._whole.add(
            **{name: value for name, value in figures.items() if name not in ("to_device_bytes", "to_host_bytes")}
        )


NAMES = ("to_device_bytes", "to_host_bytes", "disk_read_bytes", "disk_written_bytes", "exposed_s")
