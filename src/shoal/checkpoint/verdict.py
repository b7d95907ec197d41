"""What the ranks of a save tell each other: a Share from each to rank 0, and one Verdict back to all."""

from __future__ import annotations

import msgspec

from shoal.checkpoint.objects import Stored


class Share(msgspec.Struct, frozen=True):
    """What one rank wrote: the objects of its parcels in their order, or why it could not. `plan` is a fingerprint."""

    plan: str
    stored: list[Stored]
    error: str | None = None


class Verdict(msgspec.Struct, frozen=True):
    """What became of a save, for all ranks: bytes are of all ranks together."""

    committed: bool
    error: str | None = None
    bytes_written: int = 0
    bytes_reused: int = 0


def encode(message: Share | Verdict) -> bytes:
    """The message as the exchange carries it."""
    return msgspec.json.encode(message)


def decode_share(value: bytes) -> Share:
    """A rank's share."""
    return msgspec.json.decode(value, type=Share)


def decode_verdict(value: bytes) -> Verdict:
    """Rank 0's verdict."""
    return msgspec.json.decode(value, type=Verdict)
