"""How the ranks of a save tell each other what they wrote: a board of small values that any rank can read.

The ranks of a save tell each other what they hold, once; afterwards only that it is still the same.

Before each save every rank publishes the hash of its inventory and reads those of the others; only for a hash that it
has not met before does it read the inventory itself, which lies under its own hash. So no rank has to guess whether
another one's tensors have changed, and ranks that hold the same publish the same.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from shoal.checkpoint.inventory import Inventory, decode, digest, encode


class Exchange(Protocol):
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
        """See `Exchange`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """See `Exchange`."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s):
                missing = [key for key in keys if key not in self._values]
                raise TimeoutError(f"nothing was published under {', '.join(missing)} within {timeout_s:g} s")
            return [self._values[key] for key in keys]

    def forget(self, keys: Sequence[str]) -> None:
        """See `Exchange`."""
        with self._changed:
            for key in keys:
                self._values.pop(key, None)


Ranks = tuple[int, ...]


class Agreement:
    """One rank's part in it. All ranks call `inventories` equally often."""

    def __init__(self, exchange: Exchange, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._exchange = exchange
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._met: dict[str, Inventory] = {}
        self._offered: tuple[Inventory, str] | None = None
        self._calls = 0
        self._said: str | None = None

    def inventories(self, own: Inventory, *, generation: int) -> dict[Ranks, Inventory]:
        """What each group of ranks that hold the same holds; raises what the exchange raises."""
        if self._world_size == 1:
            return {(0,): own}
        mine = self._offer(own)
        prefix = f"checkpoint/{generation}/held/{self._calls}"
        self._calls += 1
        self._exchange.publish(f"{prefix}/{self._rank}", mine.encode())
        keys = [f"{prefix}/{rank}" for rank in range(self._world_size)]
        digests = [value.decode() for value in self._exchange.collect(keys, self._timeout_s)]
        self._learn(digests)
        # Who has published this word has read the ones before it, so nobody needs the last one any more.
        self._exchange.forget([self._said] if self._said is not None else [])
        self._said = keys[self._rank]
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, found in enumerate(digests):
            groups[found].append(rank)
        return {tuple(ranks): self._met[found] for found, ranks in groups.items()}

    def _offer(self, own: Inventory) -> str:
        if self._offered is None or self._offered[0] is not own:
            encoded = encode(own)
            name = digest(encoded)
            self._exchange.publish(_key(name), encoded)
            self._met[name] = own
            self._offered = own, name
        return self._offered[1]

    def _learn(self, digests: list[str]) -> None:
        unknown = [found for found in dict.fromkeys(digests) if found not in self._met]
        if unknown:
            values = self._exchange.collect([_key(found) for found in unknown], self._timeout_s)
            self._met.update(zip(unknown, map(decode, values), strict=True))


def _key(name: str) -> str:
    return f"checkpoint/inventory/{name}"
