"""The bytes of one object: a safetensors file (https://github.com/huggingface/safetensors, section "Format").

    8 bytes   length of the header, little-endian
    header    JSON {key: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces to a multiple of 8
    data      the boxes, row-major, one after the other

Keys are positions ("0", "1", ...), not names: two tensors of equal content are then one object. Any safetensors
reader opens these files. Shoal's own reader checks every number in them against the file's size before it uses it.
An element type has three names: PyTorch's, which manifests use because people read them, the format's code, and the
`torch.dtype`.

Memory in which a rank's share of a checkpoint is laid out exactly as it will lie in the files.

Training waits only for the copy into this memory. It is allocated and touched once (a fresh allocation costs four times
the copy, in page faults) and used again for every save. Headers are part of it, so that the writer hashes and writes
each object as one run of bytes, without another copy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.grid import Parcel, Piece
from shoal.errors import CorruptCheckpoint, UsageError
from shoal.files import open_file
from shoal.state.target import Target
from shoal.topology.box import Box, intersection

MAX_HEADER_BYTES = 1 << 20
MAX_DIMS = 64
"""Dims of a tensor; PyTorch's own limit."""

MAX_NUMEL = (1 << 63) - 1

_LENGTH_BYTES = 8
_REPAIR = "use another checkpoint"


class Dtype(NamedTuple):
    """One element type: its name in a manifest, its code in an object, its size in bytes, PyTorch's type."""

    name: str
    code: str
    itemsize: int
    torch: torch.dtype


_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = tuple(Dtype(str(dtype).removeprefix("torch."), code, dtype.itemsize, dtype) for dtype, code in _CODES.items())
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {dtype.code: dtype for dtype in DTYPES}


def dtype_name(tensor: Tensor, name: str) -> str:
    """The manifest's name for the element type of `tensor`, which is called `name`; `UsageError` if it has none."""
    found = str(tensor.dtype).removeprefix("torch.")
    if found not in BY_NAME:
        raise UsageError(
            f"tensor {name!r} is {found}, which a checkpoint cannot hold: store one of {', '.join(BY_NAME)}"
        )
    return found


class HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one box lies in the data of an object."""

    dtype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=MAX_DIMS)]
    data_offsets: tuple[int, int]


_HEADER = msgspec.json.Decoder(dict[str, HeaderEntry])


def header_of(parcel: Parcel) -> bytes:
    """The length field and the header of the object that holds `parcel`; the data follows directly."""
    entries: dict[str, HeaderEntry] = {}
    begin = 0
    for key, piece in enumerate(parcel):
        end = begin + piece.nbytes
        entries[str(key)] = HeaderEntry(BY_NAME[piece.spec.dtype].code, list(piece.box.shape), (begin, end))
        begin = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read(path: Path) -> dict[str, Tensor]:
    """The boxes of the object at `path`, by key, as tensors over the mapped file: nothing is copied until it is used.

    Raises `CorruptCheckpoint` when the file is not what `header_of` promises.
    """
    content = _mapped(path)
    data_at = _data_start(path, content)
    header = _parse_header(path, content[_LENGTH_BYTES:data_at])
    return {key: _view(path, entry, content, data_at) for key, entry in header.items()}


def _mapped(path: Path) -> mmap.mmap:
    with open_file(path, error=CorruptCheckpoint, repair=_REPAIR) as file:
        size = os.fstat(file.fileno()).st_size
        if size < _LENGTH_BYTES:
            raise _corrupt(path, f"has {size} bytes, fewer than a header")
        # Private, not read-only: torch warns of memory that it may not write, and nothing reaches the file.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _data_start(path: Path, content: mmap.mmap) -> int:
    header_bytes = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(content) - _LENGTH_BYTES):
        raise _corrupt(path, f"announces a header of {header_bytes} bytes in a file of {len(content)}")
    return _LENGTH_BYTES + header_bytes


def _parse_header(path: Path, text: bytes) -> Mapping[str, HeaderEntry]:
    try:
        return _HEADER.decode(text)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"has a header that cannot be read ({error})") from error


def _view(path: Path, entry: HeaderEntry, content: mmap.mmap, data_at: int) -> Tensor:
    dtype = _BY_CODE.get(entry.dtype)
    begin, end = entry.data_offsets
    if dtype is None or not possible_shape(entry.shape):
        raise _corrupt(path, f"holds a box of type {entry.dtype[:20]!r} and shape {entry.shape}")
    if not 0 <= begin <= end <= len(content) - data_at or end - begin != prod(entry.shape) * dtype.itemsize:
        raise _corrupt(path, f"places a box of shape {entry.shape} at bytes {begin} to {end}")
    if (data_at + begin) % dtype.itemsize:
        raise _corrupt(path, f"places a box of {entry.dtype} at an unaligned byte, {begin}")
    if begin == end:
        return torch.empty(entry.shape, dtype=dtype.torch)
    count = prod(entry.shape)
    return torch.frombuffer(content, dtype=dtype.torch, count=count, offset=data_at + begin).view(entry.shape)


def possible_shape(shape: list[int]) -> bool:
    """Whether PyTorch can have a tensor of `shape`: its strides fit 64 bits too, where a dim is 0."""
    return len(shape) <= MAX_DIMS and min(shape, default=0) >= 0 and prod(max(1, size) for size in shape) <= MAX_NUMEL


def _corrupt(path: Path, found: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} {found}: it is not a file that Shoal wrote; delete it and use another checkpoint")


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
