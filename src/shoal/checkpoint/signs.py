"""Signs of life: a rank that still writes says so, and nobody waits longer than `timeout_s` for one that does not.

A checkpoint may take minutes to write, and a dead rank says nothing. So a message is the last of a chain:

    KEY/0 = sign, KEY/1 = sign, ..., KEY/n = message

The writer adds a sign when its disk or another rank has made progress, at most once in `timeout_s` x `SIGN_EVERY`. The
reader waits for each link alone. A disk that hangs makes no progress, so that its rank gives no sign.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from shoal.checkpoint.agreement import MessageExchange

SIGN_EVERY = 1 / 8
FIRST_HEARD = 3 / 4
"""How long rank 0 waits for a link, as a share of `timeout_s`: it names the rank that is missing to the others, which
wait for rank 0 by then for one eighth, before they give up rank 0.
"""
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
