"""What the ranks of a save tell each other, on a board of small values that every rank can read.

Before a save each rank publishes the hash of its inventory and reads those of the others; an inventory itself lies on
the board under its hash, and is read once. So no rank has to guess whether another one's tensors have changed, and
ranks that hold the same publish the same (`InventoryAgreement`). After its writes each rank publishes a `Share`; rank 0
answers with one `SaveOutcome` for all.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from shoal.checkpoint.inventory import Inventory, decode, digest, encode
from shoal.checkpoint.objects import Stored

Ranks = tuple[int, ...]
Message = TypeVar("Message")


class MessageExchange(Protocol):
    """The smallest seam between the ranks of a save. Keys are published once; values are small."""

    def publish(self, key: str, value: bytes) -> None:
        """Make `value` readable by every rank under `key`."""
        ...

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of `keys`, in their order, once all are there; after `timeout_s` an error that names the others.

        `TimeoutError` or any `ShoalError`: its message becomes part of a save's report.
        """
        ...

    def forget(self, keys: Sequence[str]) -> None:
        """Remove what was published under `keys`, which every rank has read that ever will."""
        ...


class LocalExchange:
    """A board for threads of one process. One rank alone publishes nothing on it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, value: bytes) -> None:
        """See `MessageExchange`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """See `MessageExchange`."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s):
                missing = [key for key in keys if key not in self._values]
                raise TimeoutError(f"nothing was published under {', '.join(missing)} within {timeout_s:g} s")
            return [self._values[key] for key in keys]

    def forget(self, keys: Sequence[str]) -> None:
        """See `MessageExchange`."""
        with self._changed:
            for key in keys:
                self._values.pop(key, None)


class Share(msgspec.Struct, frozen=True):
    """What one rank wrote: the objects of its parcels in their order, or why it could not. `plan` is a fingerprint."""

    plan: str
    stored: list[Stored]
    error: str | None = None


class SaveOutcome(msgspec.Struct, frozen=True):
    """What became of a save, for all ranks: bytes are of all ranks together."""

    committed: bool
    error: str | None = None
    bytes_written: int = 0
    bytes_reused: int = 0


def encode_message(message: Share | SaveOutcome) -> bytes:
    """The message as the exchange carries it."""
    return msgspec.json.encode(message)


def decode_message(value: bytes, kind: type[Message]) -> Message:
    """The `Share` or `SaveOutcome` of another rank."""
    return msgspec.json.decode(value, type=kind)


class InventoryAgreement:
    """One rank's part in knowing what all ranks hold."""

    def __init__(self, exchange: MessageExchange, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._exchange = exchange
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._known: dict[str, Inventory] = {}
        self._published: tuple[Inventory, str] | None = None
        self._last_key: str | None = None

    def inventories(self, own: Inventory, *, generation: int, call: int) -> dict[Ranks, Inventory]:
        """What each group of ranks that hold the same holds; raises what the exchange raises.

        `call` is another number in every call, and the same on all ranks.
        """
        if self._world_size == 1:
            return {(0,): own}
        mine = self._publish(own)
        prefix = f"checkpoint/{generation}/held/{call}"
        self._exchange.publish(f"{prefix}/{self._rank}", mine.encode())
        keys = [f"{prefix}/{rank}" for rank in range(self._world_size)]
        digests = [value.decode() for value in self._exchange.collect(keys, self._timeout_s)]
        self._learn(digests)
        # A rank that has published here has read what was published before, so nobody needs the last key any more.
        self._exchange.forget([self._last_key] if self._last_key is not None else [])
        self._last_key = keys[self._rank]
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, found in enumerate(digests):
            groups[found].append(rank)
        return {tuple(ranks): self._known[found] for found, ranks in groups.items()}

    def _publish(self, own: Inventory) -> str:
        if self._published is None or self._published[0] is not own:
            encoded = encode(own)
            name = digest(encoded)
            self._exchange.publish(_key(name), encoded)
            self._known[name] = own
            self._published = own, name
        return self._published[1]

    def _learn(self, digests: list[str]) -> None:
        unknown = [found for found in dict.fromkeys(digests) if found not in self._known]
        if unknown:
            values = self._exchange.collect([_key(found) for found in unknown], self._timeout_s)
            self._known.update(zip(unknown, map(decode, values), strict=True))


def _key(name: str) -> str:
    return f"checkpoint/inventory/{name}"
