"""What clients and the server say in the four phases of a round, with a bound on every field.

client -> server                             server -> client
Keys       two public keys                   Roster      everybody's keys
Sealed     for each neighbour its shares     Sealed      from each neighbour its shares
Masked     (beside the masked vector)        Survivors   whose vectors came, and whose did not
Revealed   shares of seeds and of keys
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.federated.secure.shamir import SHARE_BYTES

MOST_CLIENTS = 1 << 16
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


FromClient = Keys | Sealed | Masked | Revealed
FromServer = Roster | Sealed | Survivors


class _Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a box holds."""

    seed: Share
    key: Share


PAIR = msgspec.msgpack.Decoder(_Pair)


def pair(seed: bytes, key: bytes) -> bytes:
    """The content of a box."""
    return msgspec.msgpack.encode(_Pair(seed, key))
