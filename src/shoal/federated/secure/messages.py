"""What clients and the server say in the four phases of a round, with a bound on every field; and who masks with whom.

client -> server                             server -> client
Keys       two public keys                   Roster      everybody's keys
Sealed     for each neighbour its shares     Sealed      from each neighbour its shares
Masked     (beside the masked vector)        Survivors   whose vectors came, and whose did not
Revealed   shares of seeds and of keys

Everybody masks with everybody (SecAgg), or along a random graph in which each client has k neighbours (SecAgg+). The
graph is that of Bell et al. (eprint 2020/704, section 3): clients in a random order stand in a circle, and each is a
neighbour of the k / 2 nearest on either side. The order follows from all public keys of the round, so that nobody
knows it before everybody's key is there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from shoal.federated.secure.primitives import SHARE_BYTES

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Share = Annotated[bytes, msgspec.Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Box = Annotated[bytes, msgspec.Meta(min_length=16, max_length=512)]


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="keys"):
    """Phase 1. `sealing`: for shares; `masking`: for masks."""

    sealing: Key
    masking: Key


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="roster"):
    """Who takes part, and which part of a client's neighbours must be there at the end."""

    keys: dict[Name, Keys]
    degree: int | None
    threshold: float


class Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sealed"):
    """Phase 2. `boxes`: by the other end. `commitment`: SHA-256 of the sender's seed; empty from the server."""

    boxes: dict[Name, Box]
    commitment: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class Masked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="masked"):
    """Phase 3: a masked vector has come, of so many numbers."""

    numel: int


class Survivors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="survivors"):
    """Whose vectors are in the sum, and who was lost after it had shared its secrets; of a client's neighbours."""

    there: tuple[Name, ...]
    lost: tuple[Name, ...]


class Revealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="revealed"):
    """Phase 4. `seeds`: shares of those that are there; `keys`: of those that were lost."""

    seeds: dict[Name, Share]
    keys: dict[Name, Share]


FromServer = Roster | Sealed | Survivors


class _Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a box holds."""

    seed: Share
    key: Share


PAIR = msgspec.msgpack.Decoder(_Pair)


def pair(seed: bytes, key: bytes) -> bytes:
    """The content of a box."""
    return msgspec.msgpack.encode(_Pair(seed, key))


def places_of(roster: Roster) -> dict[str, int]:
    """Where each client's shares lie on the polynomials: 1, 2, ... in order of names."""
    return {name: place for place, name in enumerate(sorted(roster.keys), 1)}


def neighbours(keys: Mapping[str, bytes], degree: int | None) -> dict[str, tuple[str, ...]]:
    """The neighbours of each client, sorted; `keys` are their public keys. `degree` is rounded up to an even number."""
    names = sorted(keys)
    if degree is None or degree + degree % 2 >= len(names) - 1:
        return {name: tuple(other for other in names if other != name) for name in names}
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + keys[name])
    circle = sorted(names, key=lambda name: hashlib.sha256(digest.digest() + name.encode()).digest())
    return {name: tuple(sorted(_beside(circle, place, -(-degree // 2)))) for place, name in enumerate(circle)}


def shares_needed(threshold: float, neighbours: int) -> int:
    """How many of a client and its `neighbours` must give their shares: the part `threshold`, more than half."""
    holders = neighbours + 1
    return max(math.ceil(threshold * holders), holders // 2 + 1)


def _beside(circle: Sequence[str], place: int, half: int) -> list[str]:
    steps = [step for step in range(-half, half + 1) if step]
    return [circle[(place + step) % len(circle)] for step in steps]
