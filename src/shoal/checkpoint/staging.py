"""Memory in which a rank's share of a checkpoint is laid out exactly as it will lie in the files.

Training waits only for the copy into this memory. It is allocated and touched once (a fresh allocation costs four times
the copy, in page faults) and used again for every save. Headers are part of it, so that the writer hashes and writes
each object as one run of bytes, without another copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.grid import Parcel, Piece
from shoal.checkpoint.tensorfile import BY_NAME, header_of
from shoal.state.target import Target
from shoal.topology.box import Box, intersection

_ALIGNMENT_BYTES = 64


class _Slot(NamedTuple):
    """Where one piece is copied from (target number `source` of a name, and an index into it) and to."""

    name: str
    source: int
    part: tuple[slice, ...] | None
    memory: Tensor


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
            self._slots.extend(self._slots_of(parcel, begin + len(header), held))

    def fill(self, parts: Mapping[str, Sequence[Target]]) -> None:
        """Copy from `parts` what is written here; they may be changed as soon as this returns."""
        for name, number, part, memory in self._slots:
            source = parts[name][number].tensor.detach()
            _copy(source if part is None else source[part], memory, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()

    def objects(self) -> Iterator[memoryview]:
        """The bytes of each object, in the order of the parcels."""
        for begin, end in self._extents:
            yield self._bytes[begin:end]

    def _slots_of(self, parcel: Parcel, at: int, held: Mapping[str, Sequence[Box]]) -> Iterator[_Slot]:
        for piece in parcel:
            raw = self._memory[at : at + piece.nbytes]
            at += piece.nbytes
            if piece.nbytes:
                memory = raw.view(BY_NAME[piece.spec.dtype].torch).view(piece.box.shape)
                yield _Slot(piece.spec.name, *_source(piece, held[piece.spec.name]), memory)


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
