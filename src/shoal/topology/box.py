"""Rectangular parts of tensors, and the cut of a run of consecutive elements into such parts."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

Dims = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of a tensor: where it begins and how far it reaches, one number a dim."""

    offset: Dims
    shape: Dims

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Elements in it."""
        return prod(self.shape)

    def relative_to(self, origin: Dims) -> Box:
        """The same box, seen from `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin, strict=True)), self.shape)

    def within(self, origin: Dims) -> Box:
        """The inverse of `relative_to`: a box seen from `origin`, in the coordinates that `origin` is given in."""
        return Box(tuple(a + b for a, b in zip(self.offset, origin, strict=True)), self.shape)


def whole(shape: Dims) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(a: Box, b: Box) -> Box | None:
    """The box that `a` and `b` share, in the tensor's own coordinates; None when they share no element."""
    start = tuple(map(max, a.offset, b.offset))
    end = tuple(min(p + n, q + m) for p, n, q, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    return Box(start, shape) if all(size > 0 for size in shape) else None


def boxes_of_run(shape: Dims, start: int, stop: int) -> Iterator[Box]:
    """The elements `start` .. `stop` of a row-major tensor as boxes, in order; at most 2 dims - 1 of them.

    What is before the first whole row and what is behind the last one are runs of a tensor with one dim less.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, start // row, start % row, stop - row * (start // row))
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start % row, row)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Dims, index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_run(shape[1:], start, stop):
        yield Box((index, *box.offset), (1, *box.shape))
