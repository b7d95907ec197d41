"""Where a rank's share of a checkpoint is laid out exactly as it will lie in the files: in memory, or in files.

Training waits only for the copy. Headers are part of it, so that the writer hashes and writes each object as one run of
bytes, without another copy.

    `Staging`       memory, allocated and touched once (a fresh allocation costs four times the copy, in page faults)
                    and used again for every save
    `FileStaging`   a file for each object, in their folder, which then gets its name: for a share that is larger than
                    the host's memory. What is not written yet lies in the page cache, of which the kernel keeps as much
                    as there is room for
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.objects import STAGED, TEMPORARY, Disk, Places, make_folders, path_named
from shoal.checkpoint.tensorfile import BY_NAME, Parcel, Piece, header_of
from shoal.state import Target
from shoal.topology.holding import Box, intersection

_ALIGNMENT_BYTES = 64


class _Slot(NamedTuple):
    """Where one piece is copied from (target number `source` of a name, and an index into it) and to."""

    name: str
    source: int
    part: tuple[slice, ...] | None
    memory: Tensor


class Laid(NamedTuple):
    """The bytes of an object, and the file that has them, where there is one."""

    content: memoryview
    file: Path | None = None


class Staging:
    """Memory for `parcels` and for nothing else; `pinned` lets an accelerator copy into it at full speed.

    `held` are the boxes that this rank holds of each tensor, in the order in which `fill` gets them.
    """

    def __init__(self, parcels: list[Parcel], held: Mapping[str, Sequence[Box]], *, pinned: bool = False) -> None:
        headers = [header_of(parcel) for parcel in parcels]
        self._extents: list[tuple[int, int]] = []
        self._slots: list[_Slot] = []
        end = 0
        for parcel, header in zip(parcels, headers, strict=True):
            begin = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            end = begin + len(header) + sum(piece.nbytes for piece in parcel)
            self._extents.append((begin, end))
        self._memory = torch.zeros(end, dtype=torch.uint8, pin_memory=pinned)
        self._pinned = pinned
        self._bytes = self._memory.numpy().data
        for parcel, header, (begin, _) in zip(parcels, headers, self._extents, strict=True):
            self._bytes[begin : begin + len(header)] = header
            self._slots.extend(_slots_of(parcel, self._memory[begin + len(header) :], held))

    def fill(self, parts: Mapping[str, Sequence[Target]]) -> None:
        """Copy from `parts` what is written here; they may be changed as soon as this returns."""
        for name, number, part, memory in self._slots:
            source = parts[name][number].tensor.detach()
            _copy(source if part is None else source[part], memory, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()

    def objects(self) -> Iterator[Laid]:
        """The bytes of each object, in the order of the parcels."""
        for begin, end in self._extents:
            yield Laid(self._bytes[begin:end])

    def clear(self) -> None:
        """The save is over: the memory is used again."""


class FileStaging:
    """The same in files beside the objects of `places`, which become objects by their names alone: the host needs
    memory for one object (a few, where they are coded). `owner` tells the files of ranks apart. A fault of the disk is
    raised by `objects`, where the save can tell it.
    """

    def __init__(
        self, parcels: list[Parcel], held: Mapping[str, Sequence[Box]], *, places: Places, disk: Disk, owner: str
    ) -> None:
        self._parcels, self._held, self._places, self._disk = parcels, held, places, disk
        self._files = [places.objects / f"{TEMPORARY}{owner}{STAGED}{number}" for number in range(len(parcels))]
        self._fault: OSError | None = None

    def fill(self, parts: Mapping[str, Sequence[Target]]) -> None:
        """Copy from `parts` what is written here; they may be changed as soon as this returns."""
        self._fault = None
        try:
            make_folders(self._places)  # somebody may have removed them since the last save
            for file, parcel in zip(self._files, self._parcels, strict=True):
                with self._disk.point("object/write", file):
                    self._lay(file, parcel, parts)
        except OSError as error:
            self._fault = error

    def objects(self) -> Iterator[Laid]:
        """The bytes of each object, in the order of the parcels. Raises `OSError` where they could not be laid out."""
        if self._fault is not None:
            raise self._fault
        for file, parcel in zip(self._files, self._parcels, strict=True):
            with path_named(file):
                content = _read(file, _size_bytes(parcel))
            yield Laid(content, file)

    def clear(self) -> None:
        """The save is over: what has not become an object goes."""
        for file in self._files:
            with suppress(OSError):  # the next start sweeps
                file.unlink(missing_ok=True)

    def _lay(self, file: Path, parcel: Parcel, parts: Mapping[str, Sequence[Target]]) -> None:
        with open(file, "wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, _size_bytes(parcel))
            opened.write(header_of(parcel))
            for piece in parcel:
                if piece.nbytes:
                    number, part = _source(piece, self._held[piece.spec.name])
                    source = parts[piece.spec.name][number].tensor.detach()
                    opened.write(_bytes((source if part is None else source[part]).cpu()).data)


def _size_bytes(parcel: Parcel) -> int:
    """Of the object that holds `parcel`."""
    return len(header_of(parcel)) + sum(piece.nbytes for piece in parcel)


def _read(file: Path, size_bytes: int) -> memoryview:
    """The bytes of `file`, in memory that the kernel has back as soon as nobody holds it. The file is not mapped: an
    error of the disk under a mapping is a signal, which would end the training. Raises `OSError`.
    """
    with open(file, "rb", buffering=0) as opened:
        memory = memoryview(mmap.mmap(-1, size_bytes))
        done = 0
        while done < size_bytes:
            count = opened.readinto(memory[done:])
            if not count:
                raise OSError(errno.EIO, f"it ends after {done} of {size_bytes} bytes")
            done += count
    return memory


def _slots_of(parcel: Parcel, memory: Tensor, held: Mapping[str, Sequence[Box]]) -> Iterator[_Slot]:
    """Where each piece of `parcel` comes from, and its place in `memory`, which has the data of one object."""
    at = 0
    for piece in parcel:
        raw = memory[at : at + piece.nbytes]
        at += piece.nbytes
        if piece.nbytes:
            own = raw.view(BY_NAME[piece.spec.dtype].torch).view(piece.box.shape)
            yield _Slot(piece.spec.name, *_source(piece, held[piece.spec.name]), own)


def _source(piece: Piece, held: Sequence[Box]) -> tuple[int, tuple[slice, ...] | None]:
    """Which of the boxes `held` the piece lies in, and where in it: None where it is that box."""
    number = next(n for n, box in enumerate(held) if intersection(box, piece.box) == piece.box)
    box = held[number]
    return number, None if box == piece.box else piece.box.relative_to(box.offset).slices


def _copy(source: Tensor, memory: Tensor, *, non_blocking: bool) -> None:
    if source.device.type == "cpu" and source.is_contiguous():
        # One thread fills the memory's bandwidth. PyTorch's parallel copy waits for its team of threads, and where the
        # cores are busy (other ranks, data workers) that took ten times the copy itself.
        np.copyto(_bytes(memory), _bytes(source))
    else:
        memory.copy_(source, non_blocking=non_blocking)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
