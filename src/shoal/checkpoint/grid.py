"""The grid on which tensors are cut and packed into objects: it depends on shapes alone, never on who holds what.

A tensor of shape `s` is cut into slabs of at most `limit` bytes, along the outermost dim that allows it, in equal
parts: with `r = floor(limit / bytes of one row)` rows at most in a slab, `n = ceil(s_0 / r)` slabs of `ceil(s_0 / n)`
rows. A row that is itself too large is cut along the next dim. Boxes are then packed in the order of their names into
parcels of at most `limit` bytes, one top-level prefix ("model/", "optimizer/") at a time; one parcel is one file.
Equal tensors that every rank holds therefore become equal bytes in any world. Where ranks hold parts of a tensor, the
cells are cut at the borders of the parts (`plan`), so that nothing has to move before it is written; loading under
another layout is the intersection of boxes. `tiles` checks the cut that a manifest claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from shoal.topology.box import Box, Dims, whole

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
