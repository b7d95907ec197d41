"""State as plain JSON: a frozen copy in which nothing was changed, or a refusal that names the value.

The bytes of one object: a safetensors file, written and read within bounds.

    8 bytes   length of the header, little-endian
    header    JSON {key: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces to a multiple of 8
    data      the boxes, row-major, one after the other

Keys are positions ("0", "1", ...), not names: two tensors of equal content are then one object. Any safetensors
reader opens these files; Shoal's own reader trusts no number in them before it is checked against the file's size.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.checkpoint.dtypes import BY_NAME, DTYPES
from shoal.checkpoint.grid import Parcel
from shoal.errors import CorruptCheckpoint, UsageError


def plain(value: Any, where: str) -> Any:
    """A deep copy of `value` made of JSON's own types; `where` is its name in the message of a `UsageError`.

    JSON would turn NaN into null and the key 1 into "1" without a word, so both are refused; a tuple becomes a list.
    """
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}, which JSON cannot hold: save None or a string in its place")
    if value is None or type(value) in (str, bool, int, float):
        return value
    raise UsageError(
        f"{where} is of type {type(value).__name__}; the state of a checkpoint is JSON: pass tensors as tensors, "
        "and the rest as numbers, strings, lists and mappings"
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise UsageError(f"{where} has the key {key!r}; the keys of a checkpoint's state are strings: use {str(key)!r}")
    return key


MAX_HEADER_BYTES = 1 << 20
_LENGTH_BYTES = 8
_BY_CODE = {dtype.code: dtype for dtype in DTYPES}


class HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one box lies in the data of an object."""

    dtype: str
    shape: list[int]
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
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < _LENGTH_BYTES:
                raise _corrupt(path, f"has {size} bytes, fewer than a header")
            # Private, not read-only: torch warns of memory that it may not write, and nothing reaches the file.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read ({error.strerror}): use another checkpoint") from error


def _data_start(path: Path, content: mmap.mmap) -> int:
    header_bytes = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(content) - _LENGTH_BYTES):
        raise _corrupt(path, f"announces a header of {header_bytes} bytes in a file of {len(content)}")
    return _LENGTH_BYTES + header_bytes


def _parse_header(path: Path, text: bytes) -> Mapping[str, HeaderEntry]:
    try:
        return _HEADER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(path, f"has a header that cannot be read ({error})") from error


def _view(path: Path, entry: HeaderEntry, content: mmap.mmap, data_at: int) -> Tensor:
    dtype = _BY_CODE.get(entry.dtype)
    begin, end = entry.data_offsets
    if dtype is None or any(size < 0 for size in entry.shape):
        raise _corrupt(path, f"holds a box of type {entry.dtype!r} and shape {entry.shape}")
    if not 0 <= begin <= end <= len(content) - data_at or end - begin != prod(entry.shape) * dtype.itemsize:
        raise _corrupt(path, f"places a box of shape {entry.shape} at bytes {begin} to {end}")
    if (data_at + begin) % dtype.itemsize:
        raise _corrupt(path, f"places a box of {entry.dtype} at an unaligned byte, {begin}")
    if begin == end:
        return torch.empty(entry.shape, dtype=dtype.torch)
    count = prod(entry.shape)
    return torch.frombuffer(content, dtype=dtype.torch, count=count, offset=data_at + begin).view(entry.shape)


def _corrupt(path: Path, found: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} {found}: it is not a file that Shoal wrote; delete it and use another checkpoint")
