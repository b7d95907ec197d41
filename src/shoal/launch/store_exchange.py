"""Small messages between ranks, through the run's store and beside its collectives.

A background thread (a checkpoint that is being written) may not use the main thread's process groups: their order of
operations is the same on every rank, and the thread's is not. Keyed messages have no order to disturb.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from shoal.errors import CollectiveError

# The store drops a client that sends more than 8 MiB at once (torch 2.13, libuv backend).
PART_BYTES = 4 << 20


class StoreExchange:
    """Publish under a key, collect by keys. Has a connection of its own; use one exchange a thread."""

    def __init__(self, store: Store) -> None:
        # A blocking wait holds a connection: the main thread must never queue behind it.
        self._store: Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue] missing in torch's stubs

    def publish(self, key: str, value: bytes) -> None:
        """Make `value` readable under `key`, whole or not at all, for as long as the store lives."""
        starts = range(0, len(value), PART_BYTES)
        for part, start in enumerate(starts):
            self._store.set(f"{key}/{part}", value[start : start + PART_BYTES])  # pyright: ignore[reportArgumentType] bytes are legal
        # The count goes last: where it is, every part is.
        self._store.set(f"{key}/parts", str(len(starts)))

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of `keys`, in their order, once all are published.

        Raises `CollectiveError`, which names the keys that are missing after `timeout_s`.
        """
        try:
            self._store.wait([f"{key}/parts" for key in keys], timedelta(seconds=timeout_s))
        except DistStoreError as error:
            missing = [key for key in keys if not self._store.check([f"{key}/parts"])]
            raise CollectiveError(
                f"nothing was published under {', '.join(missing[:8])} ({len(missing)} of {len(keys)} keys) within "
                f"{timeout_s:g} s: every rank has to; see the log of those ranks"
            ) from error
        return [self._read(key) for key in keys]

    def forget(self, keys: Sequence[str]) -> None:
        """Remove what was published under `keys`; a key that is not there is no error."""
        for key in keys:
            if self._store.check([f"{key}/parts"]):
                parts = int(self._store.get(f"{key}/parts"))
                for name in ("parts", *range(parts)):
                    self._store.delete_key(f"{key}/{name}")

    def _read(self, key: str) -> bytes:
        parts = int(self._store.get(f"{key}/parts"))
        return b"".join(self._store.get(f"{key}/{part}") for part in range(parts))
