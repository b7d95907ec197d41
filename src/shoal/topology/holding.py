"""`Holding`: what one rank holds of one parameter of the unsplit model, and with whom it has to agree on it.

    inside   ranks of this replica whose gradients of this part are summed: each has seen other samples or other
             tokens, or computes one term of the gradient
    across   ranks of the other replicas that hold the same part, and this one: one in each replica. How they agree
             is the choice of `[sync]`
    shard    those of `inside` over which ZeRO divides this part and its optimizer state
    holders  ranks of this replica that hold the same numbers; the first of them counts them in a norm

Gradient reduction asks `inside` and `across`, ZeRO `shard`, the norm and the parameter count `counts`, checkpoints
`boxes`, and messages `placement` for the names of the axes.

Of a packed parameter (queries, keys and values in one matrix) a rank holds a box of each block: the numbers of its
tensor are those of its boxes, one box after the other, each row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shoal.topology.layout import Layout, Placement, placed

# Rectangular parts of tensors, and the cut of a run of consecutive elements into such parts.


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


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """One parameter on one rank, by its name in the unsplit model. Ranks are those of the world, ascending."""

    name: str
    global_shape: Dims
    boxes: tuple[Box, ...]
    placement: Placement
    rank: int
    inside: Ranks
    across: Ranks
    shard: Ranks
    holders: Ranks

    @property
    def box(self) -> Box:
        """The only box. Raises `ValueError` where there are several."""
        (found,) = self.boxes
        return found

    @property
    def counts(self) -> bool:
        """Whether this is the rank of its replica at which these numbers are counted."""
        return self.rank == self.holders[0]

    @property
    def sums(self) -> Ranks:
        """The ranks of all replicas whose gradients of this part add up to the gradient of the global batch."""
        return tuple(sorted(inside + other - self.rank for inside in self.inside for other in self.across))


@dataclass(frozen=True)
class AlongTensor:
    """How a dense parameter lies along `tensor`. `split`: each place has another part of it; `partial`: each place
    computes one term of its gradient, not the whole. `same` are the places that hold the same part as this rank
    (default: itself alone if split, else all).
    """

    split: bool = False
    partial: bool = False
    same: tuple[int, ...] | None = None


def held(
    layout: Layout,
    rank: int,
    name: str,
    global_shape: Dims,
    *,
    boxes: tuple[Box, ...] | None = None,
    tensor: AlongTensor = AlongTensor(),
    tied: Iterable[int] = (),
) -> Holding:
    """The holding of a dense parameter.

    `boxes` are the parts of it that this rank holds (None: all). `tied` are the places along `pipeline` that hold this
    parameter if several stages do: their gradients add up too.
    """
    place, stage = layout.index("tensor", rank), layout.index("pipeline", rank)
    same = tensor.same or ((place,) if tensor.split else tuple(range(layout.tensor)))
    stages = sorted({stage, *tied})
    batch = layout.group(("shard", "context"), rank)
    placement = placed(
        "dense",
        sharded=("tensor",) if tensor.split else (),
        partial=(*(("tensor",) if tensor.partial else ()), *(("pipeline",) if len(stages) > 1 else ())),
    )
    return Holding(
        name,
        global_shape,
        boxes or (whole(global_shape),),
        placement,
        rank,
        inside=_at(layout, batch, stages, same if tensor.partial else (place,)),
        across=layout.group("replicate", rank),
        shard=layout.group("shard", rank),
        holders=_at(layout, batch, stages, same),
    )


def held_expert(layout: Layout, rank: int, name: str, global_shape: Dims, *, box: Box | None = None) -> Holding:
    """The holding of an expert's parameter: each token is sent to it once, so its gradient has one term on each rank
    of `expert_shard`.
    """
    shard = layout.group("expert_shard", rank)
    return Holding(
        name,
        global_shape,
        (box or whole(global_shape),),
        placed("expert"),
        rank,
        inside=shard,
        across=layout.group("replicate", rank),
        shard=shard,
        holders=shard,
    )


def _at(layout: Layout, ranks: Iterable[int], stages: Iterable[int], tensors: Iterable[int]) -> Ranks:
    """`ranks` moved to each of the given places along `pipeline` and `tensor`."""
    stages, tensors = set(stages), set(tensors)
    return tuple(
        sorted(
            other
            for rank in ranks
            for other in layout.group(("pipeline", "tensor"), rank)
            if layout.index("pipeline", other) in stages and layout.index("tensor", other) in tensors
        )
    )
