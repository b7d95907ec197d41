"""How tensors become objects: a grid of boxes that depends on shapes alone, never on who holds what.

A tensor of shape `s` is cut into slabs of at most `limit` bytes, along the outermost dim that allows it, in equal
parts: with `r = floor(limit / bytes of one row)` rows at most in a slab, `n = ceil(s_0 / r)` slabs of `ceil(s_0 / n)`
rows. A row that is itself too large is cut along the next dim. Boxes are then packed in the order of their names into
parcels of at most `limit` bytes, one top-level prefix ("model/", "optimizer/") at a time; one parcel is one file.
Equal tensors therefore become equal bytes whatever layout wrote them, and loading under another layout is the
intersection of boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from math import ceil, prod
from typing import NamedTuple

from shoal.topology.box import Box, Dims

MAX_PIECES = 1024
"""Boxes in one parcel: bounds the header of an object, which a reader must bound too."""


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


def boxes(shape: Dims, limit: int) -> Iterator[Box]:
    """The boxes of at most `limit` elements that tile `shape`, in row-major order; an empty tensor is one empty box."""
    if prod(shape) == 0:
        yield Box((0,) * len(shape), shape)
        return
    block = block_shape(shape, limit)
    for offset in product(*(range(0, size, step) for size, step in zip(shape, block, strict=True))):
        reach = tuple(min(step, size - at) for step, size, at in zip(block, shape, offset, strict=True))
        yield Box(offset, reach)


def family(name: str) -> str:
    """The top-level prefix of a tensor's name: "model" of "model/embed.weight"; empty where there is none."""
    return name.partition("/")[0] if "/" in name else ""


def parcels(specs: Iterable[TensorSpec], object_bytes: int) -> list[Parcel]:
    """Everything to be saved, as parcels of at most `object_bytes` (more only where one element is larger)."""
    ordered = sorted(specs, key=lambda spec: (family(spec.name), spec.name))
    groups = (group for _, group in groupby(ordered, key=lambda spec: family(spec.name)))
    return [parcel for group in groups for parcel in _pack(_pieces(group, object_bytes), object_bytes)]


def assign(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which parcels each rank writes: the largest first, each to the rank that has least, so that shares are level.

    Graham, "Bounds on multiprocessing timing anomalies" (1969): never worse than 4/3 of the best split.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += sizes[index]
    return [sorted(share) for share in shares]


def _pieces(specs: Iterable[TensorSpec], object_bytes: int) -> Iterator[Piece]:
    for spec in specs:
        for box in boxes(spec.shape, max(1, object_bytes // spec.itemsize)):
            yield Piece(spec, box)


def _pack(pieces: Iterable[Piece], object_bytes: int) -> Iterator[Parcel]:
    """First come, first packed. Within a parcel wide elements go first, so that each box is aligned without padding."""
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
