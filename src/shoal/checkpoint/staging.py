"""Memory in which a rank's share of a checkpoint is laid out exactly as it will lie in the files.

Training waits only for the copy into this memory. It is allocated and touched once (a fresh allocation costs four times
the copy, in page faults) and used again for every save. Headers are part of it, so that the writer hashes and writes
each object as one run of bytes, without another copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.dtypes import BY_NAME
from shoal.checkpoint.grid import Parcel
from shoal.checkpoint.tensorfile import header_of

_ALIGNMENT_BYTES = 64


class _Slot(NamedTuple):
    name: str
    part: tuple[slice, ...] | None
    memory: Tensor


class Staging:
    """Memory for `parcels` and for nothing else; `pinned` lets an accelerator copy into it at full speed."""

    def __init__(self, parcels: list[Parcel], *, pinned: bool = False) -> None:
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
            self._slots.extend(self._slots_of(parcel, begin + len(header)))

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the boxes of `tensors` in; they may be changed as soon as this returns."""
        for name, part, memory in self._slots:
            source = tensors[name].detach()
            _copy(source if part is None else source[part], memory, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()

    def objects(self) -> Iterator[memoryview]:
        """The bytes of each object, in the order of the parcels."""
        for begin, end in self._extents:
            yield self._bytes[begin:end]

    def _slots_of(self, parcel: Parcel, at: int) -> Iterator[_Slot]:
        for piece in parcel:
            raw = self._memory[at : at + piece.nbytes]
            at += piece.nbytes
            part = None if piece.box.shape == piece.spec.shape else piece.box.slices
            yield _Slot(piece.spec.name, part, raw.view(BY_NAME[piece.spec.dtype].torch).view(piece.box.shape))


def _copy(source: Tensor, memory: Tensor, *, non_blocking: bool) -> None:
    if source.device.type == "cpu" and source.is_contiguous():
        # One thread fills the memory's bandwidth. PyTorch's parallel copy waits for its team of threads, and where the
        # cores are busy (other ranks, data workers) that took ten times the copy itself.
        np.copyto(_bytes(memory), _bytes(source))
    else:
        memory.copy_(source, non_blocking=non_blocking)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
