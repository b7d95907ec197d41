"""What many ranks tell each other, put together once: N ranks that read N keys each are N^2 answers of the store."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec

from shoal.errors import CollectiveError

MANY = 64
"""From so many ranks on, rank 0 reads what all have published, and publishes it once."""
MOST_PACKED_BYTES = 64 << 20


def packed(values: Iterable[bytes]) -> bytes:
    """Values of many ranks, which are much alike, in few bytes. Raises `CollectiveError` for what is too much."""
    whole = msgspec.msgpack.encode(list(values))
    _require_bounded(whole)
    return zlib.compress(whole, 1)


def unpacked(content: bytes) -> list[bytes]:
    """The values. Raises `CollectiveError` for what is too much."""
    whole = zlib.decompressobj().decompress(content, MOST_PACKED_BYTES + 1)
    _require_bounded(whole)
    return msgspec.msgpack.decode(whole, type=list[bytes])


def _require_bounded(whole: bytes) -> None:
    if len(whole) > MOST_PACKED_BYTES:
        raise CollectiveError(f"what ranks tell each other has more than {MOST_PACKED_BYTES} bytes: use smaller groups")
