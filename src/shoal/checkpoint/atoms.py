"""Who holds what of one tensor, told apart: the coarsest boxes inside which every element has the same holders.

Ranks cut a tensor as they like: tensor parallelism in columns, ZeRO in runs of a flat buffer, two stages of a pipeline
each in its own way. Boxes of different ranks that are equal or have nothing in common need no cut. Where they overlap
otherwise, they are cut at each other's borders, and then every element of what they cover must have the same number of
holders: they are copies, each cut in its own way. Anything else is a mistake: two ranks believe to own one element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shoal.checkpoint.inventory import said
from shoal.errors import UsageError
from shoal.topology.box import Box, Dims, intersection, whole

Ranks = tuple[int, ...]


class Atom(NamedTuple):
    """A box, and the ranks that hold all of it; no other rank holds any of it."""

    box: Box
    ranks: Ranks


def atoms_of(name: str, shape: Dims, holders: Mapping[Box, Ranks]) -> list[Atom]:
    """The atoms of the tensor `name`, in row-major order of their first elements.

    `holders` has the ranks of each box that any rank holds. Raises `UsageError` where a part has no holder, or where
    boxes overlap that do not belong to whole copies. An empty tensor is one empty atom.
    """
    if not whole(shape).numel:
        return [Atom(whole(shape), tuple(sorted({rank for ranks in holders.values() for rank in ranks})))]
    pieces = _told_apart(sorted(box for box in holders if box.numel))
    _require_covered(name, shape, pieces)
    atoms = [
        Atom(box, tuple(sorted({rank for source in sources for rank in holders[source]}))) for box, sources in pieces
    ]
    _require_copies(name, holders, pieces, atoms)
    return sorted(atoms)


class _Piece(NamedTuple):
    """A box, and the boxes that it is the intersection of."""

    box: Box
    sources: tuple[Box, ...]


def _told_apart(boxes: list[Box]) -> list[_Piece]:
    """The pieces that the borders of `boxes`, which are in order, cut each other into."""
    done: list[_Piece] = []
    active: list[_Piece] = []
    for box in boxes:
        # Boxes come by their first row: what ends before this one meets none of those that follow.
        done += [piece for piece in active if _ends_before(piece.box, box)]
        reached, rest = [], [box]
        for piece in active:
            shared = intersection(piece.box, box)
            if shared is not None:
                reached.append(_Piece(shared, (*piece.sources, box)))
                reached += [_Piece(part, piece.sources) for part in minus(piece.box, shared)]
                rest = [part for other in rest for part in minus(other, shared)]
            elif not _ends_before(piece.box, box):
                reached.append(piece)
        active = reached + [_Piece(part, (box,)) for part in rest]
    return done + active


def minus(box: Box, hole: Box) -> Iterator[Box]:
    """What remains of `box` without `hole`, as boxes without an element in common."""
    shared = intersection(box, hole)
    if shared is None:
        yield box
        return
    offset, shape = list(box.offset), list(box.shape)
    for dim in range(len(shape)):
        end, hole_end = offset[dim] + shape[dim], shared.offset[dim] + shared.shape[dim]
        for start, stop in ((offset[dim], shared.offset[dim]), (hole_end, end)):
            if start < stop:
                yield Box((*offset[:dim], start, *offset[dim + 1 :]), (*shape[:dim], stop - start, *shape[dim + 1 :]))
        offset[dim], shape[dim] = shared.offset[dim], shared.shape[dim]


def _ends_before(a: Box, b: Box) -> bool:
    return bool(a.shape) and a.offset[0] + a.shape[0] <= b.offset[0]


def _require_covered(name: str, shape: Dims, pieces: list[_Piece]) -> None:
    if sum(piece.box.numel for piece in pieces) == whole(shape).numel:
        return
    rest = [whole(shape)]
    for piece in pieces:
        rest = [part for other in rest for part in minus(other, piece.box)]
    raise UsageError(
        f"no rank holds {said(rest[0])} of {name}, whose shape is {list(shape)}: every part of a tensor needs a rank "
        "that saves it"
    )


def _require_copies(name: str, holders: Mapping[Box, Ranks], pieces: list[_Piece], atoms: list[Atom]) -> None:
    """All pieces of a box must have equally many holders; so then have all boxes that overlap, one by one."""
    counts: dict[Box, set[int]] = defaultdict(set)
    others: dict[Box, Box] = {}
    for piece, atom in zip(pieces, atoms, strict=True):
        for source in piece.sources:
            counts[source].add(len(atom.ranks))
            others.update((source, other) for other in piece.sources if other != source)
    wrong = min((box for box, found in counts.items() if len(found) > 1), default=None)
    if wrong is not None:
        a, b = sorted((wrong, others[wrong]))
        raise UsageError(
            f"rank {holders[a][0]} holds {said(a)} of {name} and rank {holders[b][0]} holds {said(b)}: parts are equal "
            "or have nothing in common, unless they belong to whole copies; one of these ranks holds the wrong part"
        )
