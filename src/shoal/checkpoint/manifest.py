"""What a checkpoint contains: every tensor's global shape, its boxes and their objects, and the state beside them.

A manifest is deterministic JSON: equal checkpoints are equal bytes, but for the time. Parsing is strict, since the file
may come from anywhere: bounded size, no unknown field, and the boxes of every tensor must tile it exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shoal.checkpoint.dtypes import BY_NAME
from shoal.errors import CorruptCheckpoint, VerificationFailed

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20
"""A trillion parameters with their optimizer state, in objects of 8 MiB."""

MAX_CORNERS = 1 << 25
"""Corners of all boxes of one tensor: bounds the work of checking a tiling, and is beyond any real cut."""

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class BoxEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One box of a tensor, and where its elements are."""

    offset: list[Size]
    shape: list[Size]
    object: Digest
    key: str


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its name in the unsplit model, its element type, its global shape, and the boxes that tile it."""

    name: str
    dtype: str
    shape: list[Size]
    boxes: list[BoxEntry]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint. `created` is in unix seconds; `objects` gives the bytes of each file by its hash."""

    format_version: int
    step: Size
    generation: Size
    created: float
    tensors: list[TensorEntry]
    objects: dict[Digest, Size]
    state: dict[str, Any]
    layout: dict[str, Any]
    writer: dict[str, str]


class _Version(msgspec.Struct):
    format_version: int


_VERSION = msgspec.json.Decoder(_Version)
_MANIFEST = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """The file's content."""
    return msgspec.json.encode(manifest, order="deterministic") + b"\n"


def read(path: Path) -> Manifest:
    """The manifest at `path`; `CorruptCheckpoint` names the file when it is not a whole and consistent one."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read ({error.strerror}): use another checkpoint") from error
    if len(content) > MAX_MANIFEST_BYTES:
        raise CorruptCheckpoint(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: it is no manifest of Shoal's")
    return decode(content, path)


def decode(content: bytes, path: Path) -> Manifest:
    """The manifest whose file is `content`; `path` is for the messages."""
    try:
        version = _VERSION.decode(content).format_version
        if version != FORMAT_VERSION:
            raise VerificationFailed(
                f"{path} has the format {version}, and this Shoal reads {FORMAT_VERSION}: use the Shoal that wrote it"
            )
        manifest = _MANIFEST.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is damaged ({error}): use another checkpoint") from error
    problem = _inconsistency(manifest)
    if problem:
        raise CorruptCheckpoint(f"{path} contradicts itself ({problem}): use another checkpoint")
    return manifest


def _inconsistency(manifest: Manifest) -> str | None:
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) < len(names):
        return "two tensors have one name"
    problems = (_tensor_problem(tensor, manifest.objects) for tensor in manifest.tensors)
    return next((problem for problem in problems if problem), None)


def _tensor_problem(tensor: TensorEntry, objects: dict[str, int]) -> str | None:
    if tensor.dtype not in BY_NAME:
        return f"tensor {tensor.name!r} has the unknown type {tensor.dtype!r}"
    if not tiles(tensor.shape, tensor.boxes):
        return f"the boxes of tensor {tensor.name!r} do not tile its shape {tensor.shape}"
    itemsize = BY_NAME[tensor.dtype].itemsize
    for box in tensor.boxes:
        if prod(box.shape) * itemsize > objects.get(box.object, -1):
            return f"a box of tensor {tensor.name!r} does not fit in its object {box.object}"
    return None


def tiles(shape: Sequence[int], boxes: Sequence[BoxEntry]) -> bool:
    """Whether `boxes` tile `shape`: every element in exactly one box.

    The number of boxes at an element is the sum, over all dims, of what begins minus what ends before it. So it is 1
    everywhere in `shape` and 0 outside of it if and only if the corners of the boxes, each with the sign of the
    mixed difference, add up to the corners of `shape`. That takes O(n 2^d) for d dims that are cut at all, where
    comparing pairs would let a hostile file cost O(n^2).
    """
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return False
    if prod(shape) == 0:
        return [(box.offset, box.shape) for box in boxes] == [([0] * len(shape), list(shape))]
    if any(size == 0 for box in boxes for size in box.shape):
        return False
    everything = ([0] * len(shape), list(shape))
    cut = [dim for dim, size in enumerate(shape) if any(b.offset[dim] or b.shape[dim] != size for b in boxes)]
    if len(boxes) << len(cut) > MAX_CORNERS:
        return False
    found = _corners([(box.offset, box.shape) for box in boxes], cut)
    return found == _corners([everything], cut)


def _corners(boxes: Iterable[tuple[list[int], list[int]]], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """The signed corners of `boxes` along `dims`, those left out that cancel."""
    total: Counter[tuple[int, ...]] = Counter()
    for offset, shape in boxes:
        for corner in product(*(((offset[dim], 1), (offset[dim] + shape[dim], -1)) for dim in dims)):
            total[tuple(at for at, _ in corner)] += prod(sign for _, sign in corner)
    return {corner: count for corner, count in total.items() if count}
