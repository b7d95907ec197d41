"""How the ranks of a save tell each other what they wrote: a board of small values that any rank can read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


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
