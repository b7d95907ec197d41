"""How tensors become objects, and which rank writes which: computed alike on every rank, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from shoal.checkpoint.grid import Parcel, TensorSpec, assign, parcels


@dataclass(frozen=True)
class Plan:
    """`parcels` are the objects, `shares[rank]` the indices of those a rank writes, `fingerprint` tells plans apart."""

    parcels: list[Parcel]
    shares: list[list[int]]
    fingerprint: str

    def share(self, rank: int) -> list[Parcel]:
        """What `rank` writes."""
        return [self.parcels[index] for index in self.shares[rank]]


def plan_for(specs: Sequence[TensorSpec], *, world_size: int, object_bytes: int) -> Plan:
    """The plan for tensors that all of `world_size` ranks hold."""
    cut = parcels(specs, object_bytes)
    sizes = [sum(piece.nbytes for piece in parcel) for parcel in cut]
    return Plan(cut, assign(sizes, world_size), blake3(repr(cut).encode()).hexdigest())
