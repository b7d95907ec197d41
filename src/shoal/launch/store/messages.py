"""What a rank asks the store, and what it answers: frames of MessagePack (`launch.frames`), matched by number.

Sizes are bounded: a value has at most `MOST_VALUE_BYTES`, and a reply carries as many values as fit into
`REPLY_BYTES`, but at least one; the rest is asked for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Operation = Literal[
    "set", "get", "wait", "check", "add", "append", "compare_set", "delete_key", "num_keys", "list_keys"
]

SERVICE = b"store"
"""What the store's key is derived for (`handshake.key_for`)."""
MOST_VALUE_BYTES = 16 << 20
MOST_FRAME_BYTES = 2 * MOST_VALUE_BYTES + (1 << 20)
"""Of two values, which `compare_set` has, and keys."""
REPLY_BYTES = 8 << 20


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`amount` is what `add` adds. `get` and `wait` wait for all `keys`, `timeout_s` seconds at most."""

    number: int
    operation: Operation
    keys: Sequence[str] = ()
    values: Sequence[bytes] = ()
    amount: int = 0
    timeout_s: float = 0.0


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """To the request of that number. `found`: whether the keys were there in time; `amount`: a count or a sum."""

    number: int
    found: bool = True
    values: Sequence[bytes] = ()
    amount: int = 0


REQUESTS = msgspec.msgpack.Decoder(Request)
REPLIES = msgspec.msgpack.Decoder(Reply)
