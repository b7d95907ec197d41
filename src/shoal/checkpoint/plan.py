"""How tensors become objects, and which rank writes which: computed alike on every rank from what all of them hold.

The cells of the grid are cut at the borders of the parts that ranks hold, and each piece is written by one of its
holders: a save moves no bytes between ranks (decision 0008). Pieces share an object with pieces of the same holders
only, so that one rank can write all of it. Where every rank holds everything, that is the grid alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from shoal.checkpoint.atoms import Ranks, atoms_of
from shoal.checkpoint.grid import Parcel, Piece, TensorSpec, assign, boxes_within, family, max_elements, pack
from shoal.checkpoint.inventory import Inventory, Item
from shoal.errors import UsageError
from shoal.topology.box import Box


@dataclass(frozen=True)
class Plan:
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


def plan_for(inventories: Mapping[Ranks, Inventory], *, world_size: int, object_bytes: int) -> Plan:
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
    return Plan(parcels, shares, blake3(repr((parcels, shares)).encode()).hexdigest())


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
