"""What the ranks of a save tell each other, on a board of small values that every rank can read.

Before a save each rank publishes the name of its inventory, a hash and a length, and reads those of the others; an
inventory itself lies on the board under its name, and is read once. So no rank has to guess whether another one's
tensors have changed, and ranks that hold the same publish the same (`InventoryAgreement`). From `MANY` ranks on, rank 0
alone reads what each has published, and publishes it once more, put together: N ranks that read N keys each are N^2
answers. Inventories are put together up to `MANY` of them and up to `TOGETHER_BYTES`: all ranks know the lengths, and
so which. After its writes each rank publishes a `Share`; rank 0 answers with one `SaveOutcome` for all.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from shoal.checkpoint.objects import Stored
from shoal.checkpoint.plan import Inventory, decode, digest, encode
from shoal.comm.packing import MANY, MOST_PACKED_BYTES, packed, unpacked
from shoal.errors import CollectiveError, ShoalError

TOGETHER_BYTES = MOST_PACKED_BYTES // 2
"""Of inventories that rank 0 publishes as one value."""
FIRST_HEARD = 3 / 4
"""How long rank 0 waits for others, as a share of `timeout_s`: so it can name the rank that is missing to those that
wait for rank 0, before they give up rank 0.
"""
_FAILED = b"failed: "
"""Before what rank 0 says in the place of values; no packed value begins so."""

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
    """What one rank wrote: the objects of its parcels in their order, or why it could not. `plan` is a fingerprint.
    `damaged`: what is wrong with an object of earlier checkpoints.
    """

    plan: str
    stored: list[Stored]
    error: str | None = None
    damaged: str | None = None


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
        self._last_keys: list[str] = []
        self._collected: set[str] = set()

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
        names = [value.decode() for value in self._announced(keys, f"{prefix}/all")]
        self._learn(names)
        # A rank that has published here has read what was published before, so nobody needs the last keys any more.
        self._exchange.forget(self._last_keys)
        self._last_keys = [keys[self._rank], *([f"{prefix}/all"] if self._rank == 0 else [])]
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, name in enumerate(names):
            groups[name].append(rank)
        return {tuple(ranks): self._known[name] for name, ranks in groups.items()}

    def _publish(self, own: Inventory) -> str:
        if self._published is None or self._published[0] is not own:
            encoded = encode(own)
            name = f"{digest(encoded)}-{len(encoded)}"
            self._exchange.publish(_key(name), encoded)
            self._known[name] = own
            self._published = own, name
        return self._published[1]

    def _learn(self, names: list[str]) -> None:
        names = list(dict.fromkeys(names))
        if self._world_size < MANY:
            names = [name for name in names if name not in self._known]
        for together in _put_together(names):
            whole = _key(digest("".join(together).encode()))
            if whole not in self._collected:
                values = self._inventories(together, whole)
                self._known.update(zip(together, map(decode, values), strict=True))
                self._collected.add(whole)

    def _inventories(self, names: Sequence[str], whole: str) -> list[bytes]:
        """The inventories of these names. A single one is not put together with others: it may have any length."""
        keys = [_key(name) for name in names]
        return self._collect(keys, whole) if len(keys) > 1 else self._exchange.collect(keys, self._timeout_s)

    def _announced(self, keys: Sequence[str], whole: str) -> list[bytes]:
        """As `_collect`. Of many ranks rank 0 tells the others in time what it has waited for in vain."""
        if self._rank != 0 or self._world_size < MANY:
            return self._collect(keys, whole)
        try:
            return self._collect(keys, whole, within=FIRST_HEARD)
        except (TimeoutError, ShoalError) as error:
            self._exchange.publish(whole, _FAILED + str(error).encode())
            raise

    def _collect(self, keys: Sequence[str], whole: str, *, within: float = 1.0) -> list[bytes]:
        """The values of `keys`. Of many ranks rank 0 publishes them together under `whole`; the others read that.
        `within`: a part of the time for which the others wait.
        """
        if self._world_size < MANY or self._rank == 0:
            values = self._exchange.collect(keys, within * self._timeout_s)
            if self._world_size >= MANY:
                self._exchange.publish(whole, packed(values))
            return values
        content = self._exchange.collect([whole], self._timeout_s)[0]
        if content.startswith(_FAILED):
            raise CollectiveError(f"rank 0 says: {content.removeprefix(_FAILED).decode()}")
        return unpacked(content)


def _put_together(names: Sequence[str]) -> list[list[str]]:
    """The inventories `names` in groups of `MANY` and `TOGETHER_BYTES` at most, or of one that is longer."""
    groups: list[list[str]] = []
    nbytes = 0
    for name in names:
        own = int(name.rpartition("-")[2])
        if not groups or len(groups[-1]) == MANY or nbytes + own > TOGETHER_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(name)
        nbytes += own
    return groups


def _key(name: str) -> str:
    return f"checkpoint/inventory/{name}"


# Signs of life: a rank that still writes says so, and nobody waits longer than `timeout_s` for one that does not.
#
# A checkpoint may take minutes to write, and a dead rank says nothing. So a message is the last of a chain:
#
#     KEY/0 = sign, KEY/1 = sign, ..., KEY/n = message
#
# The writer adds a sign when its disk or another rank has made progress, at most once in `timeout_s` x `SIGN_EVERY`.
# The reader waits for each link alone. A disk that hangs makes no progress, so that its rank gives no sign.


SIGN_EVERY = 1 / 8
_SIGN = b""


class NotTold(Exception):
    """The exchange did not take what this rank had to say; `__cause__` says why."""


class Chain:
    """What this rank says under `key`. `exchange` None: nobody listens, and progress is only counted.

    After the first link that the exchange did not take, no other is tried: each try can cost `timeout_s`.
    """

    def __init__(self, exchange: MessageExchange | None, key: str, *, timeout_s: float) -> None:
        self._exchange, self._key, self._every_s = exchange, key, timeout_s * SIGN_EVERY
        self._links, self._last_s = 0, time.monotonic()
        self._broken: Exception | None = None
        self.progress = 0

    @property
    def keys(self) -> list[str]:
        """Those of all links so far."""
        return [_link(self._key, number) for number in range(self._links)]

    def moved(self) -> None:
        """There was progress: gives a sign, where one is due. Raises nothing: `require_whole` does."""
        self.progress += 1
        if self._broken is None and time.monotonic() - self._last_s >= self._every_s:
            with suppress(NotTold):
                self.say(_SIGN)

    def require_whole(self) -> None:
        """Raises `NotTold` where a link was not taken."""
        if self._broken is not None:
            raise NotTold(str(self._broken)) from self._broken

    def say(self, message: bytes) -> None:
        """The next link; a `message` that is not empty is the last. Raises `NotTold`."""
        self.require_whole()
        self._last_s = time.monotonic()
        if self._exchange is None:
            return
        self._links += 1
        try:
            self._exchange.publish(_link(self._key, self._links - 1), message)
        except Exception as error:
            self._broken = error
            raise NotTold(str(error)) from error
        self.progress += 1


def hear(
    exchange: MessageExchange, keys: Sequence[str], *, timeout_s: float, on_sign: Callable[[], None]
) -> tuple[list[bytes], list[str]]:
    """The messages of the chains `keys`, in their order, and the keys of all their links.

    Calls `on_sign` when links were heard. Raises what `MessageExchange.collect` does, `timeout_s` after the last.
    """
    heard: dict[str, bytes] = {}
    links: list[str] = []
    number = 0
    while waiting := [key for key in keys if key not in heard]:
        asked = [_link(key, number) for key in waiting]
        found = exchange.collect(asked, timeout_s)
        links += asked
        heard.update((key, message) for key, message in zip(waiting, found, strict=True) if message != _SIGN)
        number += 1
        on_sign()
    return [heard[key] for key in keys], links


def _link(key: str, number: int) -> str:
    return f"{key}/{number}"
