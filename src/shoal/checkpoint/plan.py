"""Which rank writes which part of which tensor: computed alike on every rank from what all of them hold.

Ranks cut a tensor as they like: tensor parallelism in columns, ZeRO in runs of a flat buffer, two stages of a pipeline
each in its own way. `atoms_of` finds the coarsest boxes inside which every element has the same holders. Boxes of
different ranks that are equal or have nothing in common need no cut. Where they overlap otherwise, they are cut at each
other's borders, and then every element of what they cover must have the same number of holders: they are copies, each
cut in its own way. Anything else is a mistake: two ranks believe to own one element.

`plan_for` cuts the cells of the grid at the borders of the atoms and gives each piece to one of its holders: a save
moves no bytes between ranks (decision 0008). Pieces share an object with pieces of the same holders only, so that one
rank can write all of it. Where every rank holds everything, that is the grid alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from blake3 import blake3

from shoal.checkpoint.tensorfile import (
    BY_NAME,
    Parcel,
    Piece,
    TensorSpec,
    assign,
    boxes_within,
    dtype_name,
    family,
    max_elements,
    pack,
)
from shoal.errors import UsageError
from shoal.state import Target
from shoal.topology.holding import Box, Dims, intersection, whole

# What one rank holds of the tensors that are saved, as data.
#
# A rank publishes its inventory, a list of items: the name, type and shape of each tensor of the unsplit model, and the
# boxes of it that lie here. From the inventories of all ranks, each makes the same plan.


class Item(NamedTuple):
    """The boxes of one tensor that one rank holds. Without any it only says that other ranks hold the tensor."""

    name: str
    dtype: str
    shape: Dims
    boxes: tuple[Box, ...]

    @property
    def spec(self) -> TensorSpec:
        """The tensor as the grid sees it."""
        return TensorSpec(self.name, self.dtype, BY_NAME[self.dtype].itemsize, self.shape)


Inventory = Sequence[Item]

_INVENTORY = msgspec.msgpack.Decoder(list[Item])


def inventory_of(parts: Mapping[str, Sequence[Target]]) -> list[Item]:
    """What `parts` are parts of. Raises `UsageError` where they contradict themselves or cannot be saved."""
    return [_item(name, targets) for name, targets in parts.items()]


def encode(inventory: Inventory) -> bytes:
    """The inventory as the exchange carries it."""
    return msgspec.msgpack.encode(inventory)


def decode(value: bytes) -> list[Item]:
    """The inventory of another rank."""
    return _INVENTORY.decode(value)


def digest(encoded: bytes) -> str:
    """A name for an encoded inventory: equal for equal ones."""
    return blake3(encoded).hexdigest()


def _item(name: str, targets: Sequence[Target]) -> Item:
    if not targets:
        return Item(name, "", (), ())
    first = targets[0]
    item = Item(name, dtype_name(first.tensor, name), tuple(first.global_shape), tuple(t.box for t in targets))
    for target in targets[1:]:
        if target.tensor.dtype != first.tensor.dtype or tuple(target.global_shape) != item.shape:
            raise UsageError(
                f"the parts of {name} on one rank are of {item.dtype} {list(item.shape)} and of "
                f"{dtype_name(target.tensor, name)} {list(target.global_shape)}: they must be parts of one tensor"
            )
    _require_sound(item)
    return item


def _require_sound(item: Item) -> None:
    everything = whole(item.shape)
    for number, box in enumerate(item.boxes):
        fits = len(box.offset) == len(box.shape) == len(item.shape)
        if not fits or (box.numel and intersection(box, everything) != box):
            raise UsageError(f"{item.name} has the shape {list(item.shape)}, and a rank holds {said(box)} of it")
        twice = next((other for other in item.boxes[:number] if intersection(box, other)), None)
        if twice is not None:
            raise UsageError(f"one rank holds a part of {item.name} twice, in {said(twice)} and in {said(box)}")


def said(box: Box) -> str:
    """The box as people write a slice: `[0:4, 2:3]`."""
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(box.offset, box.shape, strict=True))}]"


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


@dataclass(frozen=True)
class SavePlan:
    """`parcels` are the objects, `shares[rank]` the indices of those a rank writes, `fingerprint` tells plans apart."""

    parcels: list[Parcel]
    shares: list[list[int]]
    fingerprint: str

    def share(self, rank: int) -> list[Parcel]:
        """What `rank` writes."""
        return [self.parcels[index] for index in self.shares[rank]]


@dataclass
class _Tensor:
    """One tensor, and the ranks that hold each box of it."""

    spec: TensorSpec
    first: int
    holders: dict[Box, Ranks] = field(default_factory=dict)


def plan_for(inventories: Mapping[Ranks, Inventory], *, world_size: int, object_bytes: int) -> SavePlan:
    """The plan for what ranks hold; ranks that hold the same share an inventory.

    Raises `UsageError` that names tensor and box where nobody holds a part, or two ranks hold what does not fit
    together.
    """
    by_holders: dict[tuple[str, Ranks], list[Piece]] = defaultdict(list)
    for tensor in sorted(_merged(inventories).values(), key=lambda t: (family(t.spec.name), t.spec.name)):
        for piece, ranks in _pieces(tensor, object_bytes):
            by_holders[family(piece.spec.name), ranks].append(piece)
    packed = [(ranks, parcel) for (_, ranks), pieces in by_holders.items() for parcel in pack(pieces, object_bytes)]
    parcels, holders = [parcel for _, parcel in packed], [ranks for ranks, _ in packed]
    sizes = [sum(piece.nbytes for piece in parcel) for parcel in parcels]
    shares = assign(sizes, world_size, holders=holders)
    return SavePlan(parcels, shares, blake3(repr((parcels, shares)).encode()).hexdigest())


def _merged(inventories: Mapping[Ranks, Inventory]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    expected: dict[str, int] = {}
    for ranks, inventory in inventories.items():
        for item in inventory:
            if not item.boxes:
                expected.setdefault(item.name, ranks[0])
                continue
            tensor = tensors.setdefault(item.name, _Tensor(item.spec, ranks[0]))
            _require_same(tensor, item, ranks[0])
            for box in item.boxes:
                tensor.holders[box] = tuple(sorted((*tensor.holders.get(box, ()), *ranks)))
    lost = next((name for name in expected if name not in tensors), None)
    if lost is not None:
        raise UsageError(
            f"no rank holds any of {lost}, which rank {expected[lost]} expects: one of them has to save it"
        )
    return tensors


def _require_same(tensor: _Tensor, item: Item, rank: int) -> None:
    if item.spec != tensor.spec:
        raise UsageError(
            f"rank {tensor.first} holds a part of {item.name} as {tensor.spec.dtype} {list(tensor.spec.shape)}, and "
            f"rank {rank} as {item.dtype} {list(item.shape)}: one name is one tensor of the unsplit model"
        )


def _pieces(tensor: _Tensor, object_bytes: int) -> Iterator[tuple[Piece, Ranks]]:
    spec = tensor.spec
    limit = max_elements(spec, object_bytes)
    cut = [
        (box, atom.ranks)
        for atom in atoms_of(spec.name, spec.shape, tensor.holders)
        for box in boxes_within(atom.box, spec.shape, limit)
    ]
    for box, ranks in sorted(cut):
        yield Piece(spec, box), ranks
