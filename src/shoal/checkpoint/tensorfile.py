"""From tensors in memory to files: how a tensor is cut into boxes and these into objects, and the bytes of an object.

An object is a safetensors file (https://github.com/huggingface/safetensors, section "Format").

    8 bytes   length of the header, little-endian
    header    JSON {key: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces to a multiple of 8
    data      the boxes, row-major, one after the other

Keys are positions ("0", "1", ...), not names: two tensors of equal content are then one object. Any safetensors
reader opens these files. Shoal's own reader checks every number in them against the file's size before it uses it.
An element type has three names: PyTorch's, which manifests use because people read them, the format's code, and the
`torch.dtype`.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.errors import CorruptCheckpoint, UsageError
from shoal.files import open_file
from shoal.topology.holding import Box, Dims, whole

# The grid on which tensors are cut and packed into objects: it depends on shapes alone, never on who holds what.
#
# A tensor of shape `s` is cut into slabs of at most `limit` bytes, along the outermost dim that allows it, in equal
# parts: with `r = floor(limit / bytes of one row)` rows at most in a slab, `n = ceil(s_0 / r)` slabs of `ceil(s_0 / n)`
# rows. A row that is itself too large is cut along the next dim. Boxes are then packed in the order of their names into
# parcels of at most `limit` bytes, one top-level prefix ("model/", "optimizer/") at a time; one parcel is one file.
# Equal tensors that every rank holds therefore become equal bytes in any world. Where ranks hold parts of a tensor, the
# cells are cut at the borders of the parts (`plan`), so that nothing has to move before it is written; loading under
# another layout is the intersection of boxes. `tiles` checks the cut that a manifest claims.


MAX_PIECES = 1024
"""Boxes in one parcel: bounds the header of an object, which a reader must bound too."""

MAX_CORNERS = 1 << 21
"""Corners of all boxes of one tensor: bounds the memory of checking a tiling, and is beyond any real cut."""


class TensorSpec(NamedTuple):
    """What the grid needs to know of a tensor: its name, its element type and the bytes of one element, its shape."""

    name: str
    dtype: str
    itemsize: int
    shape: Dims


class Piece(NamedTuple):
    """One box of one tensor."""

    spec: TensorSpec
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the box's elements."""
        return prod(self.box.shape) * self.spec.itemsize


Parcel = tuple[Piece, ...]


def block_shape(shape: Dims, limit: int) -> Dims:
    """The shape of the grid's cells: at most `limit` elements (at least one), outermost dims cut first."""
    block = list(shape)
    for dim, size in enumerate(shape):
        inner = prod(block[dim + 1 :])
        if size * inner <= limit:
            break
        rows = max(1, limit // inner)
        block[dim] = ceil(size / ceil(size / rows))
    return tuple(block)


def boxes_within(part: Box, shape: Dims, limit: int) -> Iterator[Box]:
    """The shares that `part` has of the cells of `shape`, in row-major order; an empty part is itself."""
    if part.numel == 0:
        yield part
        return
    reach = list(zip(part.offset, part.shape, block_shape(shape, limit), strict=True))
    for at in product(*(range(start // step, -(-(start + size) // step)) for start, size, step in reach)):
        starts = tuple(max(start, n * step) for n, (start, _, step) in zip(at, reach, strict=True))
        ends = (min(start + size, (n + 1) * step) for n, (start, size, step) in zip(at, reach, strict=True))
        yield Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def family(name: str) -> str:
    """The top-level prefix of a tensor's name: "model" of "model/embed.weight"; empty where there is none."""
    return name.partition("/")[0] if "/" in name else ""


def assign(sizes: Sequence[int], ranks: int, *, holders: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
    """Which parcels each rank writes: the largest first, each to the rank that has least, so that shares are level.

    `holders[i]` are the ranks that can write parcel `i`; default: all. Graham, "Bounds on multiprocessing timing
    anomalies" (1969): where all can, never worse than 4/3 of the best split.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = min(holders[index] if holders is not None else range(ranks), key=lambda rank: (loads[rank], rank))
        shares[rank].append(index)
        loads[rank] += sizes[index]
    return [sorted(share) for share in shares]


def max_elements(spec: TensorSpec, object_bytes: int) -> int:
    """How many elements of a tensor fit in one object; at least one."""
    return max(1, object_bytes // spec.itemsize)


def pack(pieces: Iterable[Piece], object_bytes: int) -> Iterator[Parcel]:
    """`pieces` in parcels of at most `object_bytes`: first come, first packed.

    Within a parcel wide elements go first, so that each box is aligned without padding.
    """
    parcel: list[Piece] = []
    filled = 0
    for piece in pieces:
        if parcel and (filled + piece.nbytes > object_bytes or len(parcel) == MAX_PIECES):
            yield _aligned(parcel)
            parcel, filled = [], 0
        parcel.append(piece)
        filled += piece.nbytes
    if parcel:
        yield _aligned(parcel)


def _aligned(parcel: list[Piece]) -> Parcel:
    return tuple(sorted(parcel, key=lambda piece: -piece.spec.itemsize))


def tiles(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether `boxes` tile `shape`: every element in exactly one box; False for more than `MAX_CORNERS` corners.

    The number of boxes at an element is the sum, over all dims, of what begins minus what ends before it. So it is 1
    everywhere in `shape` and 0 outside of it if and only if the corners of the boxes, each with the sign of the
    mixed difference, add up to the corners of `shape`. That takes O(n 2^d) for d dims that are cut at all, where
    comparing pairs would let a hostile file cost O(n^2).
    """
    everything = whole(tuple(shape))
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return False
    if everything.numel == 0:
        return list(boxes) == [everything]
    if any(size == 0 for box in boxes for size in box.shape) or corner_count(shape, boxes) > MAX_CORNERS:
        return False
    cut = _cut_dims(shape, boxes)
    return _corners(boxes, cut) == _corners([everything], cut)


def corner_count(shape: Sequence[int], boxes: Sequence[Box]) -> int:
    """How many corners `tiles` has to count; 0 where it counts none, as some box has other dims than `shape`."""
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return 0
    return len(boxes) << len(_cut_dims(shape, boxes))


def _cut_dims(shape: Sequence[int], boxes: Sequence[Box]) -> list[int]:
    """The dims along which some box does not reach from end to end."""
    return [dim for dim, size in enumerate(shape) if any(b.offset[dim] or b.shape[dim] != size for b in boxes)]


def _corners(boxes: Iterable[Box], dims: Sequence[int]) -> dict[Dims, int]:
    """The signed corners of `boxes` along `dims`, without those that cancel."""
    total: Counter[Dims] = Counter()
    for offset, shape in boxes:
        for corner in product(*(((offset[dim], 1), (offset[dim] + shape[dim], -1)) for dim in dims)):
            total[tuple(at for at, _ in corner)] += prod(sign for _, sign in corner)
    return {corner: count for corner, count in total.items() if count}


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
    return _header([(BY_NAME[piece.spec.dtype].code, list(piece.box.shape), piece.nbytes) for piece in parcel])


def file_of(streams: Sequence[bytes]) -> bytes:
    """The object that holds `streams`, each as a box of bytes."""
    return b"".join([_header([("U8", [len(stream)], len(stream)) for stream in streams]), *streams])


def data_of(parcel: Parcel, content: memoryview) -> Iterator[memoryview]:
    """The bytes of each piece in `content`, the object that staging made of `parcel`."""
    at = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    for piece in parcel:
        yield content[at : at + piece.nbytes]
        at += piece.nbytes


def _header(boxes: Iterable[tuple[str, list[int], int]]) -> bytes:
    """The length field and the header of boxes with these codes, shapes and bytes."""
    entries: dict[str, HeaderEntry] = {}
    begin = 0
    for key, (code, shape, nbytes) in enumerate(boxes):
        entries[str(key)] = HeaderEntry(code, shape, (begin, begin + nbytes))
        begin += nbytes
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
